"""Factors made beside training, in pieces: what their products are, and that all apply one mean."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsx.compress import factor_products
from dsx.compress.factor_products import (
    HostProducts,
    SideProducts,
    products_are_fp32,
    require_exact,
)
from dsx.compress.low_rank import LowRank
from dsx.compress.owners import NUM_PROBES
from dsx.compress.pieces import side_work
from dsx.config.schema import ConfigError, load_config
from dsx.core.buffers import Opening, Turns
from dsx.core.membership import Seat
from dsx.core.side_stream import SideStream
from dsx.training.coding import side_stream
from tests.compress.channels import Clusters, correlated, exact_mean, fragment_of, nmse
from tests.compress.matrices import decaying, plain_low_rank
from tests.compress.side_streams import CpuStreams, on_the_side

M, N, RANK = 37, 24, 5
PIECES = pytest.mark.parametrize("piece_numel", [1, 7 * N, M * N], ids=["row", "seven", "whole"])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes(rank: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (rank, length), generator=generator).float()


@PIECES
def test_what_a_cluster_sends_is_near_the_product(piece_numel: int) -> None:
    products, matrix = SideProducts(on_the_side(), piece_numel), randn(M, N)
    right, left, out = randn(RANK, N, seed=1), randn(RANK, M, seed=2), torch.full((RANK, M), 9.0)
    products.of_rows(right, matrix, out)
    assert torch.allclose(out.double(), right.double() @ matrix.double().T, atol=1e-5)
    out = torch.full((RANK, N), 9.0)
    products.of_columns(left, matrix, out)
    assert torch.allclose(out.double(), left.double() @ matrix.double(), atol=1e-5)
    own, lost = randn(RANK, N, seed=3), torch.full((M, N), 9.0)
    products.lost(matrix, left, own, lost)
    assert torch.allclose(
        lost.double(), matrix.double() - left.double().T @ own.double(), atol=1e-5
    )


@pytest.fixture
def setting() -> Generator[None, None, None]:
    """Put training's setting back."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def is_rounded_once(lost: Tensor, matrix: Tensor, p: Tensor, q: Tensor) -> bool:
    """Whether it is the fp32 number next to M - P Q^T, to what sums in fp64 leave open."""
    exact = matrix.double() - p.double().T @ q.double()
    return bool(((lost - exact).abs() <= 2**-24 * exact.abs() + 1e-12).all())


@PIECES
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_a_residual_is_rounded_once_where_training_lets_products_be_rounded(
    piece_numel: int, precision: str, setting: None
) -> None:
    torch.set_float32_matmul_precision(precision)
    matrix, p, q = randn(M, N), randn(12, M, seed=2), randn(12, N, seed=3)
    side, lost = on_the_side(), torch.full((M, N), 9.0)
    SideProducts(side, piece_numel).lost(matrix, p, q, lost)
    assert is_rounded_once(lost, matrix, p, q) == (precision != "highest")
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize(
    ("newer", "older", "expected"),
    [
        (None, False, True), (None, True, False), ("ieee", None, True), ("none", None, True),
        ("tf32", None, False), ("bf16", None, False),
    ],
)  # fmt: skip
def test_the_setting_is_asked_as_each_torch_wants_it(
    newer: str | None, older: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch with the newer one is not asked for the older, which it may refuse to tell."""
    known = {"fp32_precision": newer, "allow_tf32": older}
    has = SimpleNamespace(**{name: value for name, value in known.items() if value is not None})
    monkeypatch.setattr(torch.backends.cuda, "matmul", has)
    assert products_are_fp32() is expected


@pytest.mark.filterwarnings("error")
def test_the_setting_is_this_torchs(setting: None) -> None:
    for precision, is_fp32 in (("high", False), ("highest", True), ("medium", False)):
        torch.set_float32_matmul_precision(precision)
        assert products_are_fp32() is is_fp32
    torch.backends.cuda.matmul.allow_tf32 = False
    assert products_are_fp32()


@PIECES
@pytest.mark.parametrize("rank", [RANK, 1030], ids=["", "summed in blocks"])
def test_what_all_apply_has_the_same_bits(piece_numel: int, rank: int) -> None:
    """By whole numbers, too: an integer product, and two multiplications in fp32."""
    p, q = codes(rank, M, 1), codes(rank, N, 2)
    scales_p, scales_q = randn(M, seed=3).abs(), randn(N, seed=4).abs()
    here, there = torch.empty(M, N), torch.full((M, N), 9.0)
    HostProducts().mean(p, scales_p, q, scales_q, here)
    SideProducts(on_the_side(), piece_numel).mean(p, scales_p, q, scales_q, there)
    assert torch.equal(here, there)
    whole = p.long().T @ q.long()
    if rank <= 1024:
        assert torch.equal(there, whole.float() * scales_p.unsqueeze(1) * scales_q)
    else:
        assert torch.allclose(there, whole.float() * scales_p.unsqueeze(1) * scales_q, rtol=1e-6)


def test_directions_are_orthonormal_and_span_what_was_given() -> None:
    mean = randn(RANK + NUM_PROBES, M)
    for products in (SideProducts(on_the_side()), HostProducts()):
        given = mean.clone()
        total, missed = products.orthonormal(given, given[:RANK])
        p, probes = given[:RANK].double(), mean[RANK:].double()
        assert torch.allclose(p @ p.T, torch.eye(RANK).double(), atol=1e-5)
        assert torch.allclose(mean[:RANK].double() @ p.T @ p, mean[:RANK].double(), atol=1e-4)
        left = probes - probes @ p.T @ p
        assert total == pytest.approx(float(probes.square().sum()) / NUM_PROBES, rel=1e-5)
        assert missed == pytest.approx(float(left.square().sum()) / NUM_PROBES, rel=1e-4)


class Mixed(Clusters):
    """Clusters, every second one of which makes factors beside training."""

    def __init__(self, method: LowRank, num_clusters: int, sides: Sequence[SideStream]) -> None:
        fragment = fragment_of((96, 80), (50,), (64, 120), (20, 200))
        super().__init__(method, fragment, num_clusters)
        for m, side in zip(range(0, num_clusters, 2), sides, strict=True):
            opening = Opening(turns=Turns(), side=side)
            self.channels[m] = method.open(fragment, Seat.of(m, num_clusters), 0, opening)


@pytest.fixture
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_500(side: SideStream) -> SideProducts:
        return SideProducts(side, 500)

    monkeypatch.setattr("dsx.compress.low_rank_channel.SideProducts", of_500)


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("num_clusters", [2, 3, 9])
@pytest.mark.parametrize("factor_wire", ["int8", "int4"])
def test_clusters_apply_the_same_bits_wherever_they_make_factors(
    factor_wire: Any, num_clusters: int
) -> None:
    """`average` compares them; and what is kept is as near to the mean as with the host alone."""
    method = plain_low_rank(rank=8, factor_wire=factor_wire, error_feedback="fp32")
    sides = [on_the_side() for _ in range(0, num_clusters, 2)]
    mixed = Mixed(method, num_clusters, sides)
    hosts = Clusters(method, mixed.fragment, num_clusters)
    for round in (1, 2, 3):
        values = [
            torch.cat(parts)
            for parts in zip(
                decaying(96, 80, num_clusters, seed=round), correlated(50, num_clusters, round),
                decaying(64, 120, num_clusters, seed=round),
                decaying(20, 200, num_clusters, seed=round), strict=True,
            )
        ]  # fmt: skip
        exact = exact_mean(values)
        there, here = (nmse(clusters.average(values), exact) for clusters in (mixed, hosts))
        assert there == pytest.approx(here, rel=0.02)
    assert all(side.buffers.num_bytes for side in sides)


def test_all_runs_on_one_thread_on_a_stream_of_the_lowest_priority_and_is_waited_for() -> None:
    streams = CpuStreams()
    side = SideStream(torch.device("cpu"), streams)
    products, matrix = SideProducts(side, 10 * N), randn(M, N)
    calls: list[Callable[[], object]] = [
        lambda: products.of_rows(randn(RANK, N), matrix, torch.empty(RANK, M)),
        lambda: products.of_columns(randn(RANK, M), matrix, torch.empty(RANK, N)),
        lambda: products.orthonormal(randn(RANK + NUM_PROBES, M), torch.empty(RANK, M)),
    ]
    for call in calls:
        call()
    assert [stream.priority for stream in streams.made] == [0]
    expected = ["on cpu", *["begin", "record", "wait"] * len(calls)]
    assert [what for what, _ in streams.notes] == expected
    (thread,) = {thread for _, thread in streams.notes}
    assert thread != get_ident()
    assert len(streams.events) == len(calls) and all(event.blocking for event in streams.events)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_it_works_in_what_is_predicted(precision: str, setting: None) -> None:
    """All of it is asked for by one round with feedback, of the largest matrix of a kind."""
    torch.set_float32_matmul_precision(precision)
    side, method = on_the_side(), plain_low_rank(rank=8, error_feedback="fp32")
    mixed = Mixed(method, 1, [side])
    mixed.average(correlated(mixed.fragment.numel, 1))
    assert side.buffers.num_bytes == sum(method.side_work(mixed.fragment, 0).values())
    assert side_work(8192, 8192, 64)["piece"] == 4 * 2**24  # and no more


class Made(TorchDispatchMode):
    """Notes the elements of what is made, and is no part of what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and look at what comes."""
        result = func(*args, **(kwargs or {}))
        there = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        made = [t for t in tensors_in(result) if t.untyped_storage().data_ptr() not in there]
        self.numels += [t.numel() for t in made]
        return result


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_it_works_in_nothing_else(precision: str, setting: None) -> None:
    """But for a few numbers, once its memory is there; libraries' own is not seen here."""
    torch.set_float32_matmul_precision(precision)
    side, made = on_the_side(), Made()
    products, matrix, out = SideProducts(side, 7 * N), randn(M, N), torch.empty(M, N)
    p, q, mean = randn(RANK, M), randn(RANK, N), randn(RANK + NUM_PROBES, M)
    large, scales_p, scales_q = (codes(1030, M, 1), codes(1030, N, 2)), randn(M), randn(N)

    def take() -> None:
        products.of_rows(q, matrix, torch.empty(RANK, M))
        products.of_columns(p, matrix, torch.empty(RANK, N))
        products.orthonormal(mean, torch.empty(RANK, M))
        products.lost(matrix, p, q, out)
        products.mean(large[0], scales_p, large[1], scales_q, out)

    take()
    side.run(made.__enter__)
    take()
    side.run(lambda: made.__exit__(None, None, None))
    assert made.numels and max(made.numels) <= NUM_PROBES * RANK


def test_a_device_that_rounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_exact(on_the_side())

    def in_bf16(p: Tensor, q: Tensor, out: Tensor) -> None:
        out.copy_((p.bfloat16().T @ q.bfloat16()).float())

    exact, times = factor_products.product, iter([0, 1])

    def product(p: Tensor, q: Tensor, out: Tensor) -> None:
        (in_bf16 if next(times) else exact)(p, q, out)

    monkeypatch.setattr(factor_products, "product", product)
    with pytest.raises(RuntimeError, match="factors='accelerator': cpu does not sum .* 'host'"):
        require_exact(on_the_side())


def block(factors: str | None, **compression: Any) -> dict[str, Any]:
    own = {"type": "low_rank", "rank": 8, **compression}
    coding = {} if factors is None else {"factors": factors}
    clusters = {"num_clusters": 2}
    return {"dsx": {"preset": "diloco", "clusters": clusters, "compression": own, "coding": coding}}


def test_factors_are_made_where_the_state_is_unless_said_otherwise() -> None:
    cpu, cuda = torch.device("cpu"), CpuStreams()
    for factors, is_there in ((None, True), ("accelerator", True), ("host", False)):
        found = side_stream(load_config(block(factors)), cpu, cuda)
        assert (found is not None) == is_there
    assert side_stream(load_config(block(None)), cpu) is None
    assert side_stream(load_config(block(None, factor_wire="fp32")), cpu, cuda) is None
    with pytest.raises(ValueError, match="'accelerator': this rank computes on no accel.*'host'"):
        side_stream(load_config(block("accelerator")), cpu)


def test_a_place_that_would_be_ignored_or_round_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match="factors='host' has no effect with .*type='dense'"):
        load_config({"dsx": {**block("host")["dsx"], "compression": {"type": "dense"}}})
    with pytest.raises(ConfigError, match="'accelerator' with compression.factor_wire='fp32'"):
        load_config(block("accelerator", factor_wire="fp32"))
    assert load_config(block("host", factor_wire="fp32")).coding.factors == "host"
