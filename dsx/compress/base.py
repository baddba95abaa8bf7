"""The contract between what is sent and who sends it, and the exact fp32 channel.

A compressor is a choice of the configuration; it opens one channel per fragment, which owns the
buffers and the state (residuals, warm starts) of that fragment on this rank, and runs the
exchanges of its transfers one after another, on whatever thread the transport uses. State lives
on the host, beside the buffers that travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dsx.compress.averaging import ExactMean
from dsx.compress.error_feedback import Residual
from dsx.core.exchange import Exchange, Peers
from dsx.core.types import Fragment, Slot


@dataclass(frozen=True)
class Launch:
    """What a channel may need to know of a transfer: equal on every cluster.

    `round` counts the fragment's transfers from 1, `rank` is that of low-rank codecs.
    """

    round: int
    rank: int | None = None


@dataclass(frozen=True)
class CodingError:
    """What coding lost of the elements start..stop of a fragment on the wire.

    Of what this cluster sends, or (`is_of_mean`) of the means that it encodes for all.
    """

    start: int
    stop: int
    residual: Residual
    is_of_mean: bool = False


class Channel(Protocol):
    """One fragment's way over the network, for one rank."""

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """State that a checkpoint has to carry, by name; on the CPU, changed in place."""
        ...

    @property
    def errors(self) -> Mapping[str, CodingError]:
        """Return those of the slots that are residuals, with the elements they are of."""
        ...

    @property
    def spectrum(self) -> Tensor | None:
        """Return what the round just ended tells of the rank (see low_rank.py), if anything."""
        ...

    def payload_bytes(self, launch: Launch) -> int:
        """Return the bytes this cluster sends in a round, headers apart."""
        ...

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x`, fp32 `[numel]` on the CPU, in place; every cluster gets the same bits."""
        ...


class Compressor(Protocol):
    """How pseudo-gradients travel."""

    @property
    def is_exact(self) -> bool:
        """Whether the mean is that of the fp32 values themselves."""
        ...

    @property
    def needs_whole_matrices(self) -> bool:
        """Whether shards have to be put together before coding."""
        ...

    def takes(self, slot: Slot) -> bool:
        """Whether a whole parameter is one of those."""
        ...

    @property
    def captures_spectrum(self) -> bool:
        """Whether its channels tell of the rank, by `spectrum`."""
        ...

    def validate(self) -> None:
        """Raise ValueError for values that cannot work."""
        ...

    def open(self, fragment: Fragment, peers: Peers, max_rank: int) -> Channel:
        """Return the channel of one fragment, with its buffers, for ranks up to `max_rank`."""
        ...

    def state_bytes(self, fragment: Fragment, peers: Peers, max_rank: int) -> int:
        """Return what that channel's `slots` take: residuals, warm starts."""
        ...


@dataclass(frozen=True)
class Dense:
    """Send the fp32 pseudo-gradient as it is: 4 bytes per element, no error."""

    is_exact = True
    captures_spectrum = False
    needs_whole_matrices = False

    def takes(self, slot: Slot) -> bool:
        """No parameter has to be whole."""
        return False

    def validate(self) -> None:
        """Nothing to check."""

    def open(self, fragment: Fragment, peers: Peers, max_rank: int) -> DenseChannel:
        """Return a channel that averages in fp32."""
        return DenseChannel(fragment.numel, peers)

    def state_bytes(self, fragment: Fragment, peers: Peers, max_rank: int) -> int:
        """Nothing is kept."""
        return 0


class DenseChannel:
    """The exact mean."""

    def __init__(self, numel: int, peers: Peers) -> None:
        self.slots: Mapping[str, Tensor] = {}
        self.errors: Mapping[str, CodingError] = {}
        self._numel = numel
        self._mean = ExactMean(peers)
        self.spectrum = None

    def payload_bytes(self, launch: Launch) -> int:
        """Return the same for every round."""
        return self._mean.bytes_sent(self._numel)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x` in fp32, in place."""
        return self._mean.exchange(x)
