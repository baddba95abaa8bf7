"""How a vector is cut among the clusters that average it, and what each sends and receives then.

The arithmetic of averaging.py without its buffers: plans read it, too. An exchange round is given
as every cluster's `Passed`, in bytes, headers apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dsx.compress.wire.base import Wire
    from dsx.core.membership import Seat

GATHERED_UP_TO = 3  # clusters


class Passed(NamedTuple):
    """Bytes of one cluster in one exchange round."""

    sent: int
    received: int


Rounds = tuple[tuple[Passed, ...], ...]  # one after another; by cluster


def slice_bounds(numel: int, num_clusters: int, granularity: int = 1) -> list[tuple[int, int]]:
    """Return `(start, stop)` of each cluster's slice, cut at multiples of `granularity`.

    Lengths differ by one unit at most; slices may be empty, and the last unit may be short.
    """
    units = -(-numel // granularity)
    cuts = [min(units * m // num_clusters * granularity, numel) for m in range(num_clusters + 1)]
    return [(cuts[m], cuts[m + 1]) for m in range(num_clusters)]


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


@lru_cache(maxsize=4096)
def exact_rounds(numel: int, num_clusters: int) -> Rounds:
    """Return what a mean in fp32 takes: two clusters exchange all, of more each owns a slice."""
    if num_clusters == 1:
        return ()
    if num_clusters == 2:
        return to_all_round([4 * numel] * 2)
    sizes = [4 * (stop - start) for start, stop in slice_bounds(numel, num_clusters)]
    return to_owners_round(sizes) + to_all_round(sizes)


def exact_bytes(numel: int, num_clusters: int) -> list[int]:
    """Return what an exact mean holds of the others' values: a vector, or copies of one's slice."""
    if num_clusters <= 2:
        return [4 * numel * (num_clusters - 1)] * num_clusters
    return [4 * num_clusters * (b - a) for a, b in slice_bounds(numel, num_clusters)]


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
        outgoing = max(at_launch, 1) * sum(self.outgoing)
        return outgoing + (num_clusters - 1) * sum(self.incoming) + sum(self.means)


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


def most_work(work: Iterable[Mapping[str, int]]) -> int:
    """Return the bytes of work space that codecs share: of each role, what the largest needs."""
    most: dict[str, int] = {}
    for of_codec in work:
        for role, size in of_codec.items():
            most[role] = max(most.get(role, 0), size)
    return sum(most.values())


@lru_cache(maxsize=4096)
def coded_bytes(
    numel: int, wire: Wire, mean_wire: Wire, num_clusters: int, at_launch: int = 0
) -> tuple[int, ...]:
    """Return what the messages of a mean in codes take at each cluster: `CodedSizes.num_bytes`."""
    sizes = coded_sizes(numel, wire, mean_wire, num_clusters, 0)
    common = sizes.num_bytes(num_clusters, at_launch) - (num_clusters - 1) * sum(sizes.incoming)
    incoming = [sum(sizes.outgoing[s] for s in own) for own in sizes.owners]
    return tuple(common + (num_clusters - 1) * size for size in incoming)


@lru_cache(maxsize=65536)
def coded_rounds(numel: int, wire: Wire, mean_wire: Wire, num_clusters: int) -> Rounds:
    """Return what a mean in codes takes, gathered or by the owners of slices."""
    if num_clusters <= GATHERED_UP_TO:
        return gathered_rounds(numel, wire, num_clusters)
    bounds = mean_bounds(numel, wire, mean_wire, num_clusters)
    up, down = (
        [form.num_bytes(stop - start) for start, stop in bounds] for form in (wire, mean_wire)
    )
    return to_owners_round(up) + to_all_round(down)


def gathered_rounds(numel: int, wire: Wire, num_clusters: int) -> Rounds:
    """Return what a mean takes for which everybody gathers all codes."""
    is_sent = num_clusters > 1 and numel > 0
    return to_all_round([wire.num_bytes(numel)] * num_clusters) if is_sent else ()


def to_owners_round(sizes: Sequence[int]) -> Rounds:
    """Return the round in which all send each owner what is its, `sizes` by owner."""
    total, others = sum(sizes), len(sizes) - 1
    return (tuple(Passed(total - size, others * size) for size in sizes),)


def to_all_round(sizes: Sequence[int]) -> Rounds:
    """Return the round in which each cluster sends all others what it has, `sizes` by cluster."""
    total, others = sum(sizes), len(sizes) - 1
    return (tuple(Passed(others * size, total - size) for size in sizes),)


def side_by_side(exchanges: Iterable[Rounds]) -> Rounds:
    """Return the rounds of exchanges that run at once, their messages in one round each time."""
    running = [rounds for rounds in exchanges if rounds]
    if len(running) == 1:
        return running[0]
    found: list[tuple[Passed, ...]] = []
    for rounds in zip_longest(*running, fillvalue=()):
        by_cluster = zip(*(of_round for of_round in rounds if of_round), strict=True)
        found.append(
            tuple(Passed(sum(p.sent for p in o), sum(p.received for p in o)) for o in by_cluster)
        )
    return tuple(found)
