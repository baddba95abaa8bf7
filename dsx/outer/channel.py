"""A fragment's line to the other clusters: header, codes, notes, one transfer after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsx.compress.averaging import ExactMean
from dsx.compress.base import Channel, Launch
from dsx.core.exchange import Exchange, Peers
from dsx.outer.parity_check import Guard, Verdict
from dsx.outer.sideband import Notes, with_notes


class Line:
    """The guard and the channel of one fragment on this rank, and what a checkpoint keeps."""

    def __init__(self, channel: Channel, peers: Peers) -> None:
        self.channel = channel
        self.guard = Guard(peers)
        self._notes_mean = ExactMean(peers, "notes")

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """State by name: the channel's, and the guard's memory."""
        named = {f"codec.{name}": tensor for name, tensor in self.channel.slots.items()}
        return {**named, "guard.memory": self.guard.memory}

    def exchange(
        self,
        x: Tensor,
        is_finite: Callable[[], bool],
        launch: Launch,
        verdict: Verdict,
        notes: Notes,
        measure: Callable[[Tensor], Tensor] | None,
    ) -> Exchange:
        """Average `x` in place, with the notes; zeros, and nothing averaged, if refused.

        `is_finite` is asked first, and returns once `x` is there.
        """
        average = self._guarded(x, is_finite, launch, verdict)
        return with_notes(average, notes, measure, self._notes_mean)

    def confirm(self, verdict: Verdict) -> Exchange:
        """Exchange headers alone, after the last transfer: no later one tells of its mean."""
        yield from self.guard.exchange(True, verdict)
        return torch.empty(0)

    def _guarded(
        self, x: Tensor, is_finite: Callable[[], bool], launch: Launch, verdict: Verdict
    ) -> Exchange:
        yield from self.guard.exchange(is_finite(), verdict)
        if verdict.is_refused:
            return x.zero_()
        mean = yield from self.channel.exchange(x, launch)
        self.guard.remember(launch.round, mean)
        return mean
