"""The mean over clusters: slices, bytes, and the same value however it is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsx.comm.base import PeerLost, Submission
from dsx.comm.in_process import InProcessHub
from dsx.comm.mean import exchange_bytes, mean_in_order, slice_bounds
from dsx.compress.base import Dense


@given(numel=st.integers(0, 40), num_clusters=st.integers(1, 32))
def test_slices_cover_the_vector_and_bytes_add_up(numel: int, num_clusters: int) -> None:
    bounds = slice_bounds(numel, num_clusters)
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1
    x = torch.zeros(numel)
    total = sum(exchange_bytes(x, m, num_clusters) for m in range(num_clusters))
    assert total == 2 * (num_clusters - 1) * numel * 4


@given(numel=st.integers(1, 9), num_clusters=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_cluster_gets_the_mean_in_cluster_order(
    numel: int, num_clusters: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(numel, generator=generator) for _ in range(num_clusters)]
    expected = mean_in_order(values)
    torch.testing.assert_close(expected, torch.stack(values).mean(0), rtol=1e-5, atol=1e-6)
    transports = InProcessHub(num_clusters).transports()
    pending = [
        t.submit(Submission(0, 1), Dense().exchange(v.clone()))
        for t, v in zip(transports, values, strict=True)
    ]
    assert all(torch.equal(p.wait(), expected) for p in pending)


def test_clusters_that_launch_different_things_are_told() -> None:
    first, second = InProcessHub(2).transports()
    first.submit(Submission(0, 4), Dense().exchange(torch.zeros(3)))
    with pytest.raises(PeerLost, match="cluster 0 has fragment 0 launched at step 4, cluster 1 "):
        second.submit(Submission(0, 5), Dense().exchange(torch.zeros(3)))
