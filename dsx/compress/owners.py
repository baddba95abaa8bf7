"""Which clusters average the factors of which matrices, and how many bytes that takes.

A round of an exchange lasts as long as the cluster with most to send or to receive needs, so each
factor is shared out evenly, by itself: P and Q go one after another. factors.py says what the bytes
are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapreplace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dsx.compress.slices import Rounds, Sizes, to_all_round, to_owners_round

if TYPE_CHECKING:
    from dsx.compress.wire.base import Kernels, Wire
    from dsx.core.types import Slot

NUM_PROBES = 4  # random directions that estimate how much of the mean the factors miss
EXPONENT_BYTES = 1  # per row, up
SCALE_BYTES = 2  # per column, down


class Owners(NamedTuple):
    """The clusters that average the two factors of a matrix, by position."""

    p: int
    q: int


def factor_owners(
    sides: Sequence[tuple[int, int]], num_clusters: int, first: int
) -> tuple[Owners, ...]:
    """Return who averages P `[m, r]` and Q `[n, r]` of each matrix `(m, n)`.

    The largest first, to the cluster with least so far. Clusters are counted from `first` on for P,
    and for Q from the next one, so that the one with most of P is not the one with most of Q.
    Sizes are those at one rank for all, so that owners stay when a controller changes it.
    """
    p_owners = _share_out([m for m, _ in sides], num_clusters)
    q_owners = _share_out([n for _, n in sides], num_clusters)
    return tuple(
        Owners((p + first) % num_clusters, (q + first + 1) % num_clusters)
        for p, q in zip(p_owners, q_owners, strict=True)
    )


def two_sides(slot: Slot) -> tuple[int, int]:
    """Return a parameter as a matrix: the first dimension by all the others."""
    whole = slot.whole or slot.shape
    rows = whole[0]
    return rows, slot.numel // rows


def up_bytes(wire: Wire, rows: int, length: int) -> int:
    """Return the size of a cluster's `rows` directions of `length`, on their way to the owner."""
    return (0 if wire.is_exact else rows * EXPONENT_BYTES) + wire.num_bytes(rows * length)


def down_bytes(is_exact: bool, rows: int, length: int) -> int:
    """Return the size of a mean factor of `rows` directions of `length`, from its owner to all."""
    return 4 * rows * length if is_exact else rows * length + length * SCALE_BYTES


def factor_rounds(
    matrices: tuple[tuple[int, int, int], ...], wire: Wire, num_clusters: int, first: int
) -> Rounds:
    """Return what factors of matrices `(m, n, rank)` take in one power iteration.

    P to its owners, their means to all, then Q likewise; `first` as for `factor_owners`, whom it
    turns around and with them what each of them sends.
    """
    return np.roll(_rounds_from_the_first(matrices, wire, num_clusters), first, axis=1)


class FactorSizes(NamedTuple):
    """What a cluster's messages of one matrix take, for ranks up to one, in bytes.

    `sent` and `received` are of the larger factor, `received` of what this cluster averages.
    """

    sent: int
    received: int
    mean_p: int
    mean_q: int


def factor_sizes(
    m: int, n: int, max_rank: int, wire: Wire, owners: Owners, position: int
) -> FactorSizes:
    """Return the messages of a matrix at one cluster."""
    up = up_bytes(wire, max_rank + NUM_PROBES, m), up_bytes(wire, max_rank, n)
    averaged = [size for size, by in zip(up, owners, strict=True) if by == position]
    down = [down_bytes(wire.is_exact, max_rank, k) for k in (m, n)]
    return FactorSizes(max(up), max(averaged, default=0), *down)


class FactorBytes(NamedTuple):
    """What the matrices of a channel take: each its messages, by cluster, and work space.

    `sums` is of the work space what a cluster adds a factor up in, the largest that it owns.
    """

    num_bytes: Sizes
    work: Mapping[str, int]
    sums: Sizes


def factor_bytes(
    matrices: tuple[tuple[int, int, int], ...],
    wire: Wire,
    num_clusters: int,
    first: int,
    kernels: Kernels = "auto",
) -> FactorBytes:
    """Return what factors of matrices `(m, n, largest rank)` take, warm starts apart."""
    by_matrix = factor_owners([(m, n) for m, n, _ in matrices], num_clusters, first)
    num_bytes, sums = (np.zeros(num_clusters, dtype=np.int64) for _ in range(2))
    work: dict[str, int] = {}
    alike = Counter(zip(matrices, by_matrix, strict=True))
    for ((m, n, rank), owners), count in alike.items():
        rows = rank + NUM_PROBES
        for position in set(owners):
            own = factor_sizes(m, n, rank, wire, owners, position)
            num_bytes[position] += count * (num_clusters - 1) * own.received
            averaged = zip((rows * m, rank * n), owners, strict=True)
            most = 4 * max(size for size, by in averaged if by == position)
            sums[position] = max(sums[position], most)
        sizes = factor_sizes(m, n, rank, wire, owners, owners.p)
        num_bytes += count * (4 * NUM_PROBES * m + sizes.sent + sizes.mean_p + sizes.mean_q)
        needed = {
            "p": 4 * rows * m, "q": 4 * rank * n, "right": 4 * rows * n,
            "codes of p": 4 * rank * m, "codes of q": 4 * rank * n,
            "scaled": 4 * max(rows * m, rank * n),
        }  # fmt: skip
        for role, size in (*needed.items(), *wire.work(max(rows * m, rank * n), kernels).items()):
            work[role] = max(work.get(role, 0), size)
    return FactorBytes(num_bytes, work, sums)


@lru_cache(maxsize=1024)
def _rounds_from_the_first(
    matrices: tuple[tuple[int, int, int], ...], wire: Wire, num_clusters: int
) -> Rounds:
    owners = factor_owners([(m, n) for m, n, _ in matrices], num_clusters, 0)
    rounds: list[Rounds] = []
    for factor, probes in ((0, NUM_PROBES), (1, 0)):
        up, down = np.zeros((2, num_clusters), dtype=np.int64)  # by owner
        for (*sides, rank), by in zip(matrices, owners, strict=True):
            up[by[factor]] += up_bytes(wire, rank + probes, sides[factor])
            down[by[factor]] += down_bytes(wire.is_exact, rank, sides[factor])
        rounds += [to_owners_round(up), to_all_round(down)]
    return np.concatenate(rounds)


def _share_out(sizes: list[int], num_clusters: int) -> list[int]:
    by_load, owners = [(0, owner) for owner in range(num_clusters)], [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, owners[index] = by_load[0]
        heapreplace(by_load, (load + sizes[index], owners[index]))
    return owners
