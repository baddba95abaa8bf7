"""Results of others, taken in place of averages that this cluster has no part in.

Those that the others have come to already are fetched side by side, ahead of the step that needs
them: who heals is to take a step faster than the others do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock, Thread

from torch import Tensor

from dsx.outer.attempt import Attempt
from dsx.outer.channel import FragmentChannel
from dsx.outer.parcel import Opened
from dsx.outer.parity_check import ParityResult
from dsx.outer.sources import BeginAnew, Sources

_AHEAD = 8  # results
_AHEAD_BYTES = 1 << 26  # of all of them


class Following:
    """One rank's; `take` is called on the transfers' threads."""

    def __init__(self, sources: Sources, first_own: Callable[[], int | None]) -> None:
        """`first_own`: the first launch in which this cluster has its part, once it is known."""
        self._sources, self._first_own = sources, first_own
        self.trouble: BeginAnew | None = None  # for which the copy has to begin anew
        self._lock = Lock()
        self._ahead: dict[int, Future[Opened]] = {}  # by launch
        self._asked = 0  # the last launch whose result has been asked for
        self._most = 1  # bytes of a result

    def take(self, attempt: Attempt, channel: FragmentChannel) -> Tensor | None:
        """Return the mean that others have come to, once they have; None if it is an own one.

        The attempt's buffers and the channel are then as after an exchange.
        """
        number, first = attempt.what.number, self._first_own()
        if first is not None and number >= first:
            return None
        try:
            opened = self._result(number)
            parity = ParityResult(**opened.values["parity"])
            if parity.apart:
                raise BeginAnew(f"launch {number}: the clusters held different models")
        except BeginAnew as trouble:
            self.trouble = trouble
            raise
        buffers, tensors = attempt.buffers, opened.tensors
        buffers.parity = replace(parity, is_idle=attempt.is_idle, square=0.0)
        with channel.before.gate:  # what was sent before may now be written
            wire = buffers.begin()
        if "mean" in tensors:
            wire.copy_(tensors["mean"])
        if "sideband" in tensors:
            buffers.sideband.values.copy_(tensors["sideband"])
        slots = {n.removeprefix("codec."): t for n, t in tensors.items() if n.startswith("codec.")}
        channel.follow(attempt.launch, wire, buffers.parity, slots)
        attempt.notes = {int(id): text.encode() for id, text in opened.values["notes"].items()}
        self._sources.say("drop", number)
        return wire

    def forget(self) -> None:
        """Let go of what nobody has taken: this cluster averages again."""
        with self._lock:
            self._ahead.clear()

    def _result(self, number: int) -> Opened:
        """Return one, and ask for those behind it that there are."""
        with self._lock:
            asked = self._ahead.pop(number, None)
            self._asked = max(self._asked, number)
        opened = self._fetch(number) if asked is None else asked.result()
        first = self._first_own()
        with self._lock:
            self._most = max(self._most, opened.num_bytes)
            count = min(_AHEAD, _AHEAD_BYTES // self._most)
            last = min(number + count, self._sources.newest)
            if first is not None:
                last = min(last, first - 1)
            for following in range(self._asked + 1, last + 1):
                self._asked, self._ahead[following] = following, self._begin(following)
        return opened

    def _begin(self, number: int) -> Future[Opened]:
        future: Future[Opened] = Future()

        def run() -> None:
            try:
                future.set_result(self._fetch(number))
            except Exception as error:  # noqa: BLE001 - for whoever takes it
                future.set_exception(error)

        Thread(target=run, name="dsx-follow", daemon=True).start()
        return future

    def _fetch(self, number: int) -> Opened:
        return self._sources.parcel(("result", number), ("piece", number))
