"""How a vector is cut among the clusters that average it, and what each sends and receives then.

The arithmetic of averaging.py without its buffers: plans read it, too, of thousands of clusters,
so what is of every cluster is an array. An exchange round is given as what every cluster sends and
receives in it, in bytes, headers apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dsx.compress.wire.base import Wire
    from dsx.core.membership import Seat

GATHERED_UP_TO = 3  # clusters
LOST_TOGETHER = 2**20  # elements of a residual that are made anew at a time, of what is in codes
_KNOWN = 2048  # sizes whose rounds are remembered
SENT, RECEIVED = 0, 1

Sizes = NDArray[np.int64]
Rounds = NDArray[np.int64]  # one after another, by cluster: bytes `SENT`, and `RECEIVED`


def slice_bounds(numel: int, num_clusters: int, granularity: int = 1) -> list[tuple[int, int]]:
    """Return `(start, stop)` of each cluster's slice, cut at multiples of `granularity`.

    Lengths differ by one unit at most; slices may be empty, and the last unit may be short.
    """
    cuts = _cuts(numel, num_clusters, granularity).tolist()
    return [(cuts[m], cuts[m + 1]) for m in range(num_clusters)]


def slice_lengths(numel: int, num_clusters: int, granularity: int = 1) -> Sizes:
    """Return the lengths of those slices."""
    return np.diff(_cuts(numel, num_clusters, granularity))


def _cuts(numel: int, num_clusters: int, granularity: int) -> Sizes:
    """Return where slices begin, and the end; `units * m // num_clusters` with no large product."""
    each, left = divmod(-(-numel // granularity), num_clusters)
    numbers = np.arange(num_clusters + 1)
    return np.minimum((each * numbers + left * numbers // num_clusters) * granularity, numel)


def of_lengths(lengths: Sizes, size: Callable[[int], int]) -> Sizes:
    """Return the size of each, asked for once for all that are as long."""
    found, where = np.unique(lengths, return_inverse=True)
    return np.array([size(length) for length in found.tolist()], dtype=np.int64)[where]


def lasting_slices(seat: Seat) -> int:
    """Return how many slices codes are cut into that may be sent under another membership.

    One for each cluster that there may ever be: so all cut alike, whoever is there.
    """
    return len(seat.membership.places)


def slice_owners(num_slices: int, num_clusters: int) -> list[range]:
    """Return which slices each cluster owns: as many as there are clusters, or more."""
    cuts = [num_slices * m // num_clusters for m in range(num_clusters + 1)]
    return [range(cuts[m], cuts[m + 1]) for m in range(num_clusters)]


def mean_bounds(
    numel: int, wire: Wire, mean_wire: Wire, num_clusters: int, num_slices: int | None = None
) -> list[tuple[int, int]]:
    """Return which elements' mean each cluster encodes anew; none where all codes are gathered.

    `num_slices`: as many as there are clusters, unless said.
    """
    if num_clusters <= GATHERED_UP_TO:
        return [(0, 0)] * num_clusters
    count = num_slices or num_clusters
    slices = slice_bounds(numel, count, lcm(wire.granularity, mean_wire.granularity))
    owners = slice_owners(count, num_clusters)
    return [(slices[own[0]][0], slices[own[-1]][1]) for own in owners]


def mean_lengths(numel: int, wire: Wire, mean_wire: Wire, num_clusters: int) -> Sizes:
    """Return how many elements' mean each cluster encodes anew: the lengths of `mean_bounds`."""
    if num_clusters <= GATHERED_UP_TO:
        return np.zeros(num_clusters, dtype=np.int64)
    return slice_lengths(numel, num_clusters, lcm(wire.granularity, mean_wire.granularity))


@lru_cache(maxsize=_KNOWN)
def exact_rounds(numel: int, num_clusters: int) -> Rounds:
    """Return what a mean in fp32 takes: two clusters exchange all, of more each owns a slice."""
    if num_clusters == 1:
        return no_rounds(1)
    if num_clusters == 2:
        return to_all_round(np.full(2, 4 * numel))
    sizes = 4 * slice_lengths(numel, num_clusters)
    return np.concatenate([to_owners_round(sizes), to_all_round(sizes)])


def exact_bytes(numel: int, num_clusters: int) -> list[int]:
    """Return what an exact mean holds of the others' values: a vector, or copies of one's slice."""
    if num_clusters <= 2:
        return [4 * numel * (num_clusters - 1)] * num_clusters
    return (4 * num_clusters * slice_lengths(numel, num_clusters)).tolist()


class CodedSizes(NamedTuple):
    """The messages of a coded mean at one cluster, in bytes.

    `outgoing` and `means` are of the slices, one by one; `incoming` is one other cluster's, of
    those that this one owns. `owners` are the slices whose mean each cluster makes.
    """

    bounds: list[tuple[int, int]]
    owners: list[range]
    outgoing: list[int]
    incoming: list[int]
    means: list[int]

    def num_bytes(self, num_clusters: int, at_launch: int = 0) -> int:
        """Return what they take, with so many launches encoded at a time."""
        return max(at_launch, 1) * sum(self.outgoing) + self.received_bytes(num_clusters)

    def received_bytes(self, num_clusters: int) -> int:
        """Return the room for what all others send, and then for the means, in its place."""
        return max((num_clusters - 1) * sum(self.incoming), sum(self.means))


def coded_sizes(
    numel: int,
    wire: Wire,
    mean_wire: Wire,
    num_clusters: int,
    position: int,
    is_gathered: bool = False,
    num_slices: int | None = None,
) -> CodedSizes:
    """Return the messages of a mean in codes, gathered by all or made by the owners of slices."""
    count = num_slices or num_clusters
    if is_gathered or count <= GATHERED_UP_TO:
        count = 1
    bounds = slice_bounds(numel, count, lcm(wire.granularity, mean_wire.granularity))
    lengths = [stop - start for start, stop in bounds]
    outgoing = [wire.num_bytes(length) for length in lengths]
    if is_gathered or num_clusters <= GATHERED_UP_TO:
        return CodedSizes(bounds, [range(count)] * num_clusters, outgoing, outgoing, [])
    owners = slice_owners(count, num_clusters)
    means = [mean_wire.num_bytes(length) for length in lengths]
    return CodedSizes(bounds, owners, outgoing, [outgoing[s] for s in owners[position]], means)


def most_by_role(work: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return of each role what the largest needs, in bytes."""
    most: dict[str, int] = {}
    for of_codec in work:
        for role, size in of_codec.items():
            most[role] = max(most.get(role, 0), size)
    return most


def most_work(work: Iterable[Mapping[str, int]]) -> int:
    """Return the bytes of work space that codecs share: of each role, what the largest needs."""
    return sum(most_by_role(work).values())


@lru_cache(maxsize=_KNOWN)
def coded_bytes(
    numel: int, wire: Wire, mean_wire: Wire, num_clusters: int, at_launch: int = 0
) -> Sizes:
    """Return what the messages of a mean in codes take at each cluster: `CodedSizes.num_bytes`."""
    if num_clusters <= GATHERED_UP_TO:
        size = wire.num_bytes(numel)
        return np.full(num_clusters, (max(at_launch, 1) + num_clusters - 1) * size)
    lengths = mean_lengths(numel, wire, mean_wire, num_clusters)
    outgoing, means = (of_lengths(lengths, form.num_bytes) for form in (wire, mean_wire))
    received = np.maximum((num_clusters - 1) * outgoing, means.sum())
    return max(at_launch, 1) * outgoing.sum() + received


@lru_cache(maxsize=_KNOWN)
def coded_rounds(numel: int, wire: Wire, mean_wire: Wire, num_clusters: int) -> Rounds:
    """Return what a mean in codes takes, gathered or by the owners of slices."""
    if num_clusters <= GATHERED_UP_TO:
        return gathered_rounds(numel, wire, num_clusters)
    lengths = mean_lengths(numel, wire, mean_wire, num_clusters)
    up, down = (of_lengths(lengths, form.num_bytes) for form in (wire, mean_wire))
    return np.concatenate([to_owners_round(up), to_all_round(down)])


def gathered_rounds(numel: int, wire: Wire, num_clusters: int) -> Rounds:
    """Return what a mean takes for which everybody gathers all codes."""
    if num_clusters == 1 or numel == 0:
        return no_rounds(num_clusters)
    return to_all_round(np.full(num_clusters, wire.num_bytes(numel)))


def no_rounds(num_clusters: int) -> Rounds:
    """Return what takes no exchange."""
    return np.zeros((0, num_clusters, 2), dtype=np.int64)


def to_owners_round(sizes: Sizes) -> Rounds:
    """Return the round in which all send each owner what is its, `sizes` by owner."""
    return np.stack([sizes.sum() - sizes, (len(sizes) - 1) * sizes], axis=-1)[None]


def to_all_round(sizes: Sizes) -> Rounds:
    """Return the round in which each cluster sends all others what it has, `sizes` by cluster."""
    return np.stack([(len(sizes) - 1) * sizes, sizes.sum() - sizes], axis=-1)[None]


def side_by_side(exchanges: Sequence[Rounds], times: Sequence[int] | None = None) -> Rounds:
    """Return the rounds of exchanges that run at once, their messages in one round each time.

    `times` are how many there are of each; one, unless said.
    """
    total = np.zeros_like(max(exchanges, key=len))
    for rounds, count in zip(exchanges, times or [1] * len(exchanges), strict=True):
        total[: len(rounds)] += count * rounds
    return total
