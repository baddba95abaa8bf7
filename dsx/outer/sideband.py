"""A few numbers that travel beside a transfer, so that all clusters decide from the same.

Three kinds share one fp32 vector, which is averaged after the transfer itself:

- averages: each cluster's value, the mean comes back (sizes of first steps);
- by cluster: each cluster's own value in a place of its own, times C, so that the mean hands
  everybody all of them (measured seconds, of which the largest is taken);
- of the owner: computed from the mean by one cluster alone and handed to all (spectra), so that
  no decision rests on how a library's arithmetic rounds on one site's hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsx.core.exchange import Exchange
from dsx.core.types import Fragment
from dsx.method.method import Method

if TYPE_CHECKING:  # what only plans is started without torch
    from torch import Tensor

    from dsx.compress.averaging import ExactMean


@dataclass(frozen=True)
class SidebandShape:
    """How many values of each kind a fragment's transfers carry.

    `num_clusters` are all that the run may have: the shape is that of every membership.
    """

    averages: int
    by_cluster: int
    of_owner: int
    num_clusters: int

    @property
    def numel(self) -> int:
        """Elements of the vector; 0 if there is nothing to say."""
        return self.averages + self.by_cluster * self.num_clusters + self.of_owner


def sideband_shape(
    method: Method, fragment: Fragment, num_tensors: int, num_clusters: int
) -> SidebandShape:
    """Return what travels beside a fragment's transfers under this method."""
    return SidebandShape(
        averages=method.staleness.sideband_numel(fragment, num_tensors),
        by_cluster=3 if method.uses_seconds else 0,
        of_owner=method.control.sideband_numel(method.sync_params) + method.schedule.uses_norms,
        num_clusters=num_clusters,
    )


class Sideband:
    """The sideband of one transfer, over a CPU buffer `[shape.numel]` that is reused."""

    def __init__(self, shape: SidebandShape, buffer: Tensor) -> None:
        self.shape = shape
        self.values = buffer
        stop = shape.averages + shape.by_cluster * shape.num_clusters
        self.averages = buffer[: shape.averages]
        self.by_cluster = buffer[shape.averages : stop].view(shape.by_cluster, shape.num_clusters)
        self.of_owner = buffer[stop:]

    def post(self, place: int, values: list[float]) -> None:
        """Set this cluster's column of the values by cluster, and clear the others'."""
        self.by_cluster.zero_()
        own = self.by_cluster.new_tensor(values) * self.shape.num_clusters
        self.by_cluster[:, place] = own

    def lay_out(self, posted: Sideband, num_members: int) -> None:
        """Take what was posted, for a mean over so many clusters."""
        self.values.copy_(posted.values)
        if num_members != self.shape.num_clusters:
            self.by_cluster.mul_(num_members / self.shape.num_clusters)

    def largest(self) -> Tensor:
        """Return the largest of every value by cluster `[by_cluster]`, once averaged."""
        if not self.shape.by_cluster:
            return self.by_cluster.new_empty(0)
        return self.by_cluster.amax(dim=1)


def with_sideband(
    exchange: Exchange,
    sideband: Sideband,
    measure: Callable[[Tensor], Tensor] | None,
    average: ExactMean,
) -> Exchange:
    """Run `exchange`, then average the sideband; `measure(mean)` is what the owner adds to it."""
    mean = yield from exchange
    if sideband.values.numel():
        sideband.of_owner.zero_()
        if measure is not None:
            sideband.of_owner.copy_(measure(mean))
        yield from average.exchange(sideband.values)
    return mean
