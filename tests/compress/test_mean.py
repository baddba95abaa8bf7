"""The mean over clusters: slices, bytes, and the same value however it is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsx.comm.in_process import InProcessHub
from dsx.compress.averaging import ExactMean
from dsx.compress.slices import slice_bounds
from dsx.core.membership import Membership, Seat
from dsx.core.transport import PeerLost, Submission


@given(
    numel=st.integers(0, 700), num_clusters=st.integers(1, 32), granularity=st.sampled_from([1, 64])
)
def test_slices_cover_the_vector_and_bytes_add_up(
    numel: int, num_clusters: int, granularity: int
) -> None:
    bounds = slice_bounds(numel, num_clusters, granularity)
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False))
    assert all(start % granularity == 0 or start == numel for start, _ in bounds)
    units = [-(-(stop - start) // granularity) for start, stop in bounds]
    assert max(units) - min(units) <= 1
    total = sum(ExactMean(Seat.of(m, num_clusters)).bytes_sent(numel) for m in range(num_clusters))
    assert total == 2 * (num_clusters - 1) * numel * 4


def means(values: list[torch.Tensor], step: int = 1) -> list[torch.Tensor]:
    pending = [
        t.submit(Submission(0, step), ExactMean(t.seat).exchange(x.clone()))
        for t, x in zip(InProcessHub(Membership.of(len(values))).transports(), values, strict=True)
    ]
    return [p.wait() for p in pending]


@given(numel=st.integers(1, 9), num_clusters=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_cluster_gets_the_mean_in_cluster_order(
    numel: int, num_clusters: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(numel, generator=generator) for _ in range(num_clusters)]
    expected = values[0].clone()
    for value in values[1:]:
        expected += value
    expected /= num_clusters
    assert all(torch.equal(mean, expected) for mean in means(values))


def test_clusters_that_launch_different_things_are_told() -> None:
    first, second = InProcessHub(Membership.of(2)).transports()
    first.submit(Submission(0, 4), ExactMean(Seat.of(0, 2)).exchange(torch.zeros(3)))
    with pytest.raises(PeerLost, match="cluster 0 has fragment 0 launched at step 4, cluster 1 "):
        second.submit(Submission(0, 5), ExactMean(Seat.of(1, 2)).exchange(torch.zeros(3)))
