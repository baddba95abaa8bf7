"""The mean over clusters that every transport computes: one order, one rounding, exact bytes.

A vector of n elements is cut into C slices. Each cluster sends every other one its copy of that
one's slice, sums the C copies of its own slice in cluster order, divides by C, and sends the
result to all. Everybody so applies the same bits, in process and over a network alike. Each
cluster sends 2 * (C-1)/C * n elements, as a ring does, in two one-way latencies for any C.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

HEADER_BYTES = 24  # fragment, step and purpose as int64, once per exchange and peer


def slice_bounds(numel: int, num_clusters: int) -> list[tuple[int, int]]:
    """Return `(start, stop)` of each cluster's slice; lengths differ by at most one, may be 0."""
    return [
        (numel * m // num_clusters, numel * (m + 1) // num_clusters) for m in range(num_clusters)
    ]


def mean_in_order(copies: Sequence[Tensor]) -> Tensor:
    """Return a new tensor: the sum of the copies in cluster order, divided by their number."""
    total = copies[0].clone()
    for copy in copies[1:]:
        total.add_(copy)
    return total.div_(len(copies))


def exchange_bytes(x: Tensor, cluster_id: int, num_clusters: int) -> int:
    """Return the payload bytes cluster `cluster_id` sends to average `x`, both legs."""
    start, stop = slice_bounds(x.numel(), num_clusters)[cluster_id]
    own = stop - start
    scattered = x.numel() - own
    gathered = own * (num_clusters - 1)
    return (scattered + gathered) * x.element_size()
