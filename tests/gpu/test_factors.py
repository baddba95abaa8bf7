"""Factors that are made on a device: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import pytest
import torch

from dsx.bench.gpu.factors import factors
from dsx.compress.factor_products import HostProducts, SideProducts, require_exact
from dsx.core.side_stream import SideStream
from tests.compress.channels import Clusters, correlated
from tests.compress.matrices import plain_low_rank
from tests.compress.test_factor_products import Mixed, codes, is_rounded_once, randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_the_device() -> SideStream:
    return SideStream(torch.device("cuda", 0))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_means_have_the_hosts_bits_whatever_training_asks_of_its_products(precision: str) -> None:
    """TF32 and bf16 hold codes exactly, and sums of them are in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        side = on_the_device()
        require_exact(side)
        for m, n, rank in ((512, 768, 64), (1000, 300, 37), (256, 4096, 1024), (64, 640, 2048)):
            p, q = codes(rank, m, 1), codes(rank, n, 2)
            scales_p, scales_q = torch.rand(m), torch.rand(n)
            here, there = torch.empty(m, n), torch.empty(m, n)
            HostProducts().mean(p, scales_p, q, scales_q, here)
            SideProducts(side, 100 * n).mean(p, scales_p, q, scales_q, there)
            assert torch.equal(here, there), (m, n, rank)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_residuals_are_fp32s_whatever_training_asks_of_its_products(precision: str) -> None:
    """TF32 would leave errors of 1e-2 in sums of 256 products; below fp32 they are made in fp64."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for m, n, rank in ((512, 768, 64), (1000, 300, 256)):
            matrix, p, q = randn(m, n), randn(rank, m, seed=1), randn(rank, n, seed=2)
            lost = torch.empty(m, n)
            SideProducts(on_the_device(), 100 * n).lost(matrix, p, q, lost)
            exact = matrix.double() - p.double().T @ q.double()
            assert (lost - exact).abs().max() < 1e-3
            assert precision == "highest" or is_rounded_once(lost, matrix, p, q)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("num_clusters", [2, 9])
def test_clusters_with_and_without_a_device_apply_the_same_bits(num_clusters: int) -> None:
    """`average` compares them, over rounds with feedback."""
    method = plain_low_rank(rank=8, error_feedback="fp32")
    sides = [on_the_device() for _ in range(0, num_clusters, 2)]
    mixed = Mixed(method, num_clusters, sides)
    hosts = Clusters(method, mixed.fragment, num_clusters)
    for round in (1, 2, 3):
        values = correlated(mixed.fragment.numel, num_clusters, round)
        there, here = mixed.average(values), hosts.average(values)
        assert (there - here).norm() < 0.05 * here.norm()


def test_the_check_finds_nothing_wrong() -> None:
    rows = factors(4096, 4096, 64)
    assert [row for row in rows if row.outcome == "failed"] == []
    assert "ok" in [row.outcome for row in rows]
