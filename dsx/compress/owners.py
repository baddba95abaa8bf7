"""Which clusters average the factors of which matrices.

A swap lasts as long as the cluster with most to send or to receive needs, so each factor is shared
out evenly, by itself: P and Q go one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Owners(NamedTuple):
    """The clusters that average the two factors of a matrix."""

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


def _share_out(sizes: list[int], num_clusters: int) -> list[int]:
    load, owners = [0] * num_clusters, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = min(range(num_clusters), key=load.__getitem__)
        load[owners[index]] += sizes[index]
    return owners
