"""A fragment's channel to the other clusters: header, codes, sideband, transfer after transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsx.compress.averaging import ExactMean
from dsx.compress.base import Channel, Launch
from dsx.core.exchange import Exchange, Peers
from dsx.outer.parity_check import ParityCheck, ParityResult
from dsx.outer.sideband import Sideband, with_sideband


class FragmentChannel:
    """The parity check and the codec of one fragment on this rank, and what a checkpoint keeps."""

    def __init__(self, codec: Channel, peers: Peers) -> None:
        self.codec = codec
        self.parity_check = ParityCheck(peers)
        self._sideband_mean = ExactMean(peers, "sideband")

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """State by name: the codec's, and what the parity check remembers."""
        named = {f"codec.{name}": tensor for name, tensor in self.codec.slots.items()}
        return {**named, "parity_check.memory": self.parity_check.memory}

    def exchange(
        self,
        x: Tensor,
        is_finite: Callable[[], bool],
        launch: Launch,
        parity: ParityResult,
        sideband: Sideband,
        measure: Callable[[Tensor], Tensor] | None,
    ) -> Exchange:
        """Average `x` in place, with the sideband; zeros, and nothing averaged, if refused.

        `is_finite` is asked first, and returns once `x` is there.
        """
        average = self._checked(x, is_finite, launch, parity)
        return with_sideband(average, sideband, measure, self._sideband_mean)

    def confirm(self, parity: ParityResult) -> Exchange:
        """Exchange headers alone, after the last transfer: no later one tells of its mean."""
        yield from self.parity_check.exchange(True, parity)
        return torch.empty(0)

    def _checked(
        self, x: Tensor, is_finite: Callable[[], bool], launch: Launch, parity: ParityResult
    ) -> Exchange:
        yield from self.parity_check.exchange(is_finite(), parity)
        if parity.is_refused:
            return x.zero_()
        mean = yield from self.codec.exchange(x, launch)
        self.parity_check.remember(launch.round, mean)
        return mean
