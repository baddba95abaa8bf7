"""Which clusters average the factors of which matrices.

A mean of factors is made by one cluster, so that a swap takes as long as the cluster with most of
them sends or receives. Each of the two factors is shared out by itself: they go one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def factor_owners(
    sizes: Sequence[tuple[int, int]], num_clusters: int, first: int
) -> list[tuple[int, int]]:
    """Return the clusters that average P and Q of each matrix, given the elements of both.

    The largest first, to the cluster with least so far; clusters are counted from `first` on for P
    and from the next one for Q, so what is left uneven is of others for Q and in other fragments.
    """
    p_owners = _share_out(tuple(p for p, _ in sizes), num_clusters)
    q_owners = _share_out(tuple(q for _, q in sizes), num_clusters)
    return [
        ((p + first) % num_clusters, (q + first + 1) % num_clusters)
        for p, q in zip(p_owners, q_owners, strict=True)
    ]


@lru_cache(maxsize=4096)
def _share_out(sizes: tuple[int, ...], num_clusters: int) -> tuple[int, ...]:
    load, owners = [0] * num_clusters, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = min(range(num_clusters), key=load.__getitem__)
        load[owners[index]] += sizes[index]
    return tuple(owners)
