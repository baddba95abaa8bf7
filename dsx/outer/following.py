"""Results of others, taken in place of averages that this cluster has no part in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from dsx.outer.attempt import Attempt
from dsx.outer.channel import FragmentChannel
from dsx.outer.parity_check import ParityResult
from dsx.outer.sources import BeginAnew, Sources


class Following:
    """One rank's; `take` is called on the transfers' threads."""

    def __init__(self, sources: Sources, first_own: Callable[[], int | None]) -> None:
        """`first_own`: the first launch in which this cluster has its part, once it is known."""
        self._sources, self._first_own = sources, first_own
        self.trouble: BeginAnew | None = None  # for which the copy has to begin anew

    def take(self, attempt: Attempt, channel: FragmentChannel) -> Tensor | None:
        """Return the mean that others have come to, once they have; None if it is an own one.

        The attempt's buffers and the channel are then as after an exchange.
        """
        number, first = attempt.what.number, self._first_own()
        if first is not None and number >= first:
            return None
        try:
            opened = self._sources.parcel(("result", number), ("piece", number))
            parity = ParityResult(**opened.values["parity"])
            if parity.apart:
                raise BeginAnew(f"launch {number}: the clusters held different models")
        except BeginAnew as trouble:
            self.trouble = trouble
            raise
        buffers, tensors = attempt.buffers, opened.tensors
        buffers.parity = replace(parity, is_idle=attempt.is_idle, square=0.0)
        if "mean" in tensors:
            buffers.wire.copy_(tensors["mean"])
        if "sideband" in tensors:
            buffers.sideband.values.copy_(tensors["sideband"])
        slots = {n.removeprefix("codec."): t for n, t in tensors.items() if n.startswith("codec.")}
        channel.follow(attempt.launch, buffers.wire, buffers.parity, slots)
        attempt.notes = {int(id): text.encode() for id, text in opened.values["notes"].items()}
        self._sources.say("drop", number)
        return buffers.wire
