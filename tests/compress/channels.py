"""C clusters' channels of one fragment in one process, and what tests compare them with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.comm.in_process import InProcessHub
from dsx.compress.base import Compressor, Launch
from dsx.core.exchange import HEADER_BYTES, Exchange
from dsx.core.membership import Membership, Seat
from dsx.core.transport import Submission
from dsx.core.types import Fragment, Slot


def fragment_of(*shapes: tuple[int, ...], names: Sequence[str] = (), id: int = 0) -> Fragment:
    """A fragment of whole parameters, w0, w1, ... unless named."""
    layout: list[Slot] = []
    offset = 0
    for index, shape in enumerate(shapes):
        slot = Slot(names[index] if names else f"w{index}", shape, offset)
        layout.append(slot)
        offset += slot.numel
    return Fragment(id, 0, tuple(layout))


def drive(exchanges: Sequence[Exchange]) -> tuple[list[Tensor], list[int]]:
    """Every cluster's result of one exchange, and the payload bytes each has sent."""
    num_clusters = len(exchanges)
    transports = InProcessHub(Membership.of(num_clusters)).transports()
    pending = [t.submit(Submission(0, 1), e) for t, e in zip(transports, exchanges, strict=True)]
    headers = HEADER_BYTES * (num_clusters - 1)
    return [p.wait() for p in pending], [p.bytes_sent - headers for p in pending]


class Clusters:
    """One channel per cluster; rounds count from 1."""

    def __init__(
        self, method: Compressor, fragment: Fragment, num_clusters: int, max_rank: int = 0
    ) -> None:
        seats = [Seat.of(m, num_clusters) for m in range(num_clusters)]
        self.channels = [method.open(fragment, seat, max_rank) for seat in seats]
        self.method = method
        self.fragment = fragment
        self.round = 0
        self.bytes_sent: list[int] = []

    def average(self, values: Sequence[Tensor], rank: int | None = None) -> Tensor:
        """The mean of one round; AssertionError unless all clusters got the same bits."""
        self.round += 1
        launch = Launch(self.round, rank)
        means, self.bytes_sent = drive(
            [c.exchange(x.clone(), launch) for c, x in zip(self.channels, values, strict=True)]
        )
        for channel, x in zip(self.channels, values, strict=True):
            channel.settle(x.clone(), launch)
        assert all(torch.equal(bits(mean), bits(means[0])) for mean in means)
        return means[0]

    def payload_bytes(self, round: int, rank: int | None = None) -> list[int]:
        """What the method says that every cluster sends in a round."""
        launch = Launch(round, rank)
        return self.method.payload_bytes(self.fragment, len(self.channels), launch)

    def resumed_by(self, other: Clusters) -> Clusters:
        """Give `other` the state that a checkpoint carries, and return it."""
        other.round = self.round
        for ours, theirs in zip(self.channels, other.channels, strict=True):
            assert ours.slots.keys() == theirs.slots.keys()
            for name, tensor in theirs.slots.items():
                tensor.copy_(ours.slots[name])
        return other

    def matrix(self, index: int, x: Tensor) -> Tensor:
        """Slot `index` of a vector, in its shape."""
        slot = self.fragment.layout[index]
        return x[slot.offset : slot.offset + slot.numel].view(slot.shape)


def bits(x: Tensor) -> Tensor:
    """What distinguishes -0 from 0."""
    return x.view(torch.int32)


def correlated(numel: int, num_clusters: int, seed: int = 0) -> list[Tensor]:
    """Gaussian vectors, one per cluster, with pairwise cosine 0.5."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator)
    return [common + torch.randn(numel, generator=generator) for _ in range(num_clusters)]


def exact_mean(values: Sequence[Tensor]) -> Tensor:
    """The mean in fp64."""
    return torch.stack(list(values)).double().mean(dim=0)


def nmse(x: Tensor, exact: Tensor) -> float:
    """Squared error over squared norm."""
    return float((x.double() - exact.double()).square().sum() / exact.double().square().sum())
