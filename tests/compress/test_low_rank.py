"""Low-rank channels, one round: what is exact, what int8 factors cost, bits, what stays dense."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import LayerNorm

from dsx.compress.base import Launch
from dsx.compress.factors import product
from dsx.compress.low_rank import LowRank
from dsx.config.schema import preset
from dsx.core.exchange import Exchange, ExchangeRound
from dsx.core.types import Fragment, Slot
from dsx.engines.torch import TorchAdapter
from dsx.method.fragments import ByLayer
from dsx.method.method import SettingWarning
from dsx.outer.whole_matrices import factored, tell_what_is_factored
from tests.compress.channels import (
    Clusters,
    bits,
    correlated,
    drive,
    exact_mean,
    fragment_of,
    nmse,
)
from tests.compress.matrices import EXACT, decaying, matrix, plain_low_rank, side_by_side
from tests.compress.test_quantized import decoded, mean_in_order


@pytest.mark.parametrize("num_clusters", [1, 2, 3, 4, 5, 9])
def test_a_matrix_of_that_rank_arrives_from_the_first_round_on(num_clusters: int) -> None:
    """Rows in common, so that the mean has rank 8 as well; two matrices, a vector between."""
    fragment = fragment_of((96, 80), (50,), (64, 120))
    generator = torch.Generator().manual_seed(0)

    def of_rank_8(m: int, n: int) -> list[Tensor]:
        left = torch.randn(m, 8, generator=generator)
        return [
            (left @ torch.randn(8, n, generator=generator)).reshape(-1) for _ in range(num_clusters)
        ]

    values = side_by_side(of_rank_8(96, 80), correlated(50, num_clusters), of_rank_8(64, 120))
    clusters = Clusters(plain_low_rank(rank=8, **EXACT), fragment, num_clusters)
    assert {"q.w0", "q.w2"} <= clusters.channels[0].slots.keys()
    for _ in range(3):
        mean = clusters.average(values)
        assert nmse(mean, exact_mean(values)) ** 0.5 <= 1e-5


@pytest.mark.parametrize("num_clusters", [2, 4, 10])
@pytest.mark.parametrize("kind", ["power", "exponential"])
@pytest.mark.parametrize(("m", "n", "rank"), [(256, 128, 16), (96, 80, 8), (80, 200, 16)])
def test_int8_factors_cost_next_to_nothing(
    m: int, n: int, rank: int, kind: str, num_clusters: int
) -> None:
    """Against fp32 factors, over three rounds; and four bits would be seen."""
    values = decaying(m, n, num_clusters, kind)
    exact = exact_mean(values)
    errors: dict[str, float] = {}
    for factor_wire in ("fp32", "int8", "int4"):
        method = plain_low_rank(**{**EXACT, "rank": rank, "factor_wire": factor_wire})
        clusters = Clusters(method, fragment_of((m, n)), num_clusters)
        errors[factor_wire] = sum(nmse(clusters.average(values), exact) for _ in range(3)) / 3
    best = torch.linalg.svdvals(exact.view(m, n)).square()
    optimal = float(best[rank:].sum() / best.sum())
    assert optimal * (1 - 1e-6) <= errors["fp32"] <= 1.25 * optimal
    assert errors["int8"] <= 1.05 * errors["fp32"]
    assert errors["int4"] > 1.02 * errors["fp32"]


def test_what_int8_factors_lose_of_a_matrix_of_that_rank() -> None:
    values = [matrix(128, 96, torch.linspace(3, 1, 8), 0)] * 2
    clusters = Clusters(plain_low_rank(rank=8, min_saving=1.0), fragment_of((128, 96)), 2)
    assert "q.w0" in clusters.channels[0].slots
    for _ in range(3):
        assert nmse(clusters.average(values), values[0]) <= 5e-4


@pytest.mark.parametrize("num_clusters", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("factor_wire", ["int8", "int4", "fp32"])
def test_equal_bits_and_declared_bytes(factor_wire: Any, num_clusters: int) -> None:
    """`average` compares the bits; the first round has two iterations and sends factors twice."""
    shapes = [(96, 80), (50,), (100, 99), (20, 60), (30, 40)]
    fragment = fragment_of(*shapes, names=["a", "b", "c", "embed", "d"], id=3)
    wire: Any = "fp32" if factor_wire == "fp32" else "int4"
    method = plain_low_rank(
        rank=8, wire=wire, factor_wire=factor_wire, min_saving=1.0, error_feedback="fp32"
    )
    clusters = Clusters(method, fragment, num_clusters)
    assert taken(method, fragment) == {"a", "c", "d"}
    for round in (1, 2, 3):
        clusters.average(correlated(fragment.numel, num_clusters, seed=round))
        assert clusters.bytes_sent == clusters.payload_bytes(round)


def test_bytes_of_a_round() -> None:
    """Counted by hand: five clusters, one matrix; cluster 1 averages P, 2 Q."""
    fragment = fragment_of((128, 96), id=1)
    clusters = Clusters(plain_low_rank(rank=8), fragment, 5)
    values = decaying(128, 96, 5)

    def up(rows: int, length: int) -> int:
        return rows + rows * length + 2 * -(-rows * length // 256)

    p, q = up(8 + 4, 128), up(8, 96)  # P with four probes
    mean_p, mean_q = 8 * 128 + 2 * 128, 8 * 96 + 2 * 96
    expected = [p + q, 4 * mean_p + q, p + 4 * mean_q, p + q, p + q]
    clusters.average(values)
    assert clusters.bytes_sent == [2 * count for count in expected]  # two iterations
    assert clusters.bytes_sent == clusters.payload_bytes(1)
    clusters.average(values)
    assert clusters.bytes_sent == expected
    assert clusters.bytes_sent == clusters.payload_bytes(2)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_threads(exchange: Exchange, count: int) -> Generator[ExchangeRound, None, Tensor]:
    """Run an exchange as a machine with `count` cores would."""
    while True:
        torch.set_num_threads(count)
        try:
            round = next(exchange)
        except StopIteration as stop:
            return stop.value
        yield round


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("num_clusters", [2, 5])
def test_clusters_with_other_numbers_of_threads_decode_the_same(num_clusters: int) -> None:
    fragment = fragment_of((512, 256), (300, 700))
    method = plain_low_rank(rank=32, error_feedback="fp32")
    channels = Clusters(method, fragment, num_clusters).channels
    for round in (1, 2, 3):
        values = correlated(fragment.numel, num_clusters, seed=round)
        exchanges = [
            with_threads(channel.exchange(x.clone(), Launch(round)), 1 + index % 2)
            for index, (channel, x) in enumerate(zip(channels, values, strict=True))
        ]
        means, _ = drive(exchanges)
        for channel, x in zip(channels, values, strict=True):
            channel.settle(x, Launch(round))
        assert all(torch.equal(bits(mean), bits(means[0])) for mean in means)
        for name in ("q.w0", "q.w1"):
            warm = [channel.slots[name] for channel in channels]
            assert all(torch.equal(bits(w), bits(warm[0])) for w in warm)


@pytest.mark.parametrize("rank", [1, 1024, 1500, 4000])
def test_the_product_of_codes_is_exact_block_by_block(rank: int) -> None:
    """With the largest sums there can be, which do not fit 24 bits over more than a block."""
    generator = torch.Generator().manual_seed(rank)
    p = torch.randint(120, 128, (rank, 40), generator=generator)
    q = torch.randint(120, 128, (rank, 30), generator=generator)
    p[:, ::2] *= -1
    p[:, 0], q[:, 0] = -127, 127
    out = torch.empty(40, 30)
    product(p.float(), q.float(), out)
    blocks = [p[i : i + 1024].T @ q[i : i + 1024] for i in range(0, rank, 1024)]
    assert all((block.abs() < 2**24).all() for block in blocks)
    assert torch.equal(out, sum(block.float() for block in blocks))


def taken(method: LowRank, fragment: Fragment) -> set[str]:
    slots = Clusters(method, fragment, 1).channels[0].slots
    return {name[2:] for name in slots if name.startswith("q.")}


@pytest.mark.parametrize("rank", [1, 4, 16, 64])
@pytest.mark.parametrize(("wire", "bits_dense"), [("int4", 4.25), ("ternary", 1.85), ("fp32", 32)])
@pytest.mark.parametrize(("factor_wire", "bits_factor"), [("int8", 8.0625), ("int4", 4.25)])
def test_the_skip_rule(
    factor_wire: Any, bits_factor: float, wire: Any, bits_dense: float, rank: int
) -> None:
    """In factors only where those save a quarter or more; a rank short of the full one at most."""
    shapes = [
        (48, 48),
        (82, 82),
        (256, 256),
        (1024, 110),
        (2048, 2),
        (4096, 1),
        (1, 4096),
        (35, 70),
    ]
    method = plain_low_rank(rank=rank, wire=wire, factor_wire=factor_wire)
    expected: set[str] = set()
    for index, (m, n) in enumerate(shapes):
        own = min(rank, m - 1, n - 1)
        saving = own and m * n * bits_dense / (own * (m + n) * bits_factor)
        assert abs(saving - 1.3) > 0.01  # scales of a last, short group count
        if own and saving >= 1.3:
            expected.add(f"w{index}")
    assert taken(method, fragment_of(*shapes)) == expected


def test_embeddings_vectors_and_parts_are_not_taken() -> None:
    shapes = [(128, 128)] * 5 + [(20000,)]
    names = ["tok_embeddings.weight", "h.0.weight", "lm_head.weight", "my_head.weight", "h.1", "v"]
    fragment = fragment_of(*shapes, names=names)
    assert taken(plain_low_rank(rank=4), fragment) == {"h.0.weight", "my_head.weight", "h.1"}
    assert taken(plain_low_rank(rank=4, exclude=("h.", "v")), fragment) == {
        "tok_embeddings.weight",
        "lm_head.weight",
        "my_head.weight",
    }
    part = Slot("part", (128 * 64,), 0, start=128, whole=(128, 128))
    whole = Slot("whole", (128 * 128,), part.numel, whole=(128, 128))
    assert taken(plain_low_rank(rank=4), Fragment(0, 0, (part, whole))) == {"whole"}


@pytest.mark.parametrize("num_clusters", [1, 2, 5])
def test_what_is_not_taken_travels_in_codes(num_clusters: int) -> None:
    fragment = fragment_of((36, 36), (96, 96), (50,), (30, 50))
    values = correlated(fragment.numel, num_clusters)
    mean = Clusters(plain_low_rank(rank=8, mean_wire="int8"), fragment, num_clusters).average(
        values
    )
    for index in (0, 2, 3):
        slot = fragment.layout[index]
        own = [x[slot.offset : slot.offset + slot.numel] for x in values]
        if index == 2:
            expected = mean_in_order([x.bfloat16().float() for x in own])
        else:
            expected = mean_in_order([decoded("int4", x, 64) for x in own])
            expected = decoded("int8", expected, 256) if num_clusters > 3 else expected
        got = mean[slot.offset : slot.offset + slot.numel]
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(4096, 1), (1, 2000), (2, 1024), (3, 3, 200)])
@pytest.mark.parametrize("rank", [1, 64])
def test_thin_matrices_are_averaged_too(shape: tuple[int, ...], rank: int) -> None:
    values = correlated(fragment_of(shape).numel, 2)
    mean = Clusters(plain_low_rank(rank=rank, wire="fp32"), fragment_of(shape), 2).average(values)
    assert nmse(mean, exact_mean(values)) < 0.7  # of noise, and rank 1 of 3 at worst


SHAPE = st.one_of(
    st.tuples(st.integers(0, 80)),
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.sampled_from([(1024, 1), (1, 1500), (2, 900), (400, 3), (9, 4, 30)]),
)


@settings(max_examples=60)
@given(
    shapes=st.lists(SHAPE, max_size=4),
    num_clusters=st.integers(1, 9),
    rank=st.integers(1, 70),
    factor_wire=st.sampled_from(["fp32", "int8", "int4"]),
    wire=st.sampled_from(["fp32", "int4"]),
    feedback=st.sampled_from(["none", "fp32", "int8"]),
    scale=st.sampled_from([0.0, 1e-25, 1.0, 1e25]),
)
def test_any_layout(
    shapes: list[tuple[int, ...]],
    num_clusters: int,
    rank: int,
    factor_wire: Any,
    wire: Any,
    feedback: Any,
    scale: float,
) -> None:
    """Equal bits, declared bytes, zero for zero, and always nearer than nothing."""
    fragment = fragment_of(*shapes)
    method = plain_low_rank(
        rank=rank, factor_wire=factor_wire, wire=wire, error_feedback=feedback, min_saving=1.0
    )
    clusters = Clusters(method, fragment, num_clusters)
    values = [x * scale for x in correlated(fragment.numel, num_clusters)]
    exact = exact_mean(values)
    for round in (1, 2):
        mean = clusters.average(values)
        assert mean.isfinite().all()
        if round == 1 and fragment.numel:
            assert (mean - exact).norm() <= exact.norm()
        assert clusters.bytes_sent == clusters.payload_bytes(round)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("factor_wire", ["fp32", "int8"])
def test_the_size_of_the_values_does_not_matter(factor_wire: Any, scale: float) -> None:
    """Neither squares nor what an outer optimizer's tiny rate leaves may fall out of range."""
    values = decaying(96, 80, 2)
    method = plain_low_rank(rank=8, factor_wire=factor_wire, wire="fp32")
    clusters, scaled = (Clusters(method, fragment_of((96, 80)), 2) for _ in range(2))
    for _ in range(3):
        error = nmse(clusters.average(values), exact_mean(values))
        big = [x * scale for x in values]
        assert nmse(scaled.average(big), exact_mean(big)) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": 0}, r"compression\.rank=0 must be at least 1"),
        ({"factor_wire": "bf16"}, r"compression\.factor_wire='bf16'"),
        ({"dense_rounds": -1}, r"compression\.dense_rounds=-1"),
        ({"full_round_every": 1}, r"compression\.full_round_every=1 must be at least 2"),
        ({"min_saving": 0.9}, r"compression\.min_saving=0\.9 must be finite and at least 1"),
        ({"min_saving": float("nan")}, r"compression\.min_saving=nan"),
        ({"wire": "int5"}, r"compression\.wire='int5'"),
        ({"mean_wire": "2bit"}, r"compression\.mean_wire='2bit': owners keep nothing"),
        ({"exclude": ("wte", "")}, r"compression\.exclude=.* an empty text is part of every name"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], said: str) -> None:
    plain_low_rank().validate()
    with pytest.raises(ValueError, match=said):
        plain_low_rank(**fields).validate()


def test_kernels_are_those_of_the_factors_where_all_else_is_a_cast() -> None:
    plain_low_rank(wire="bf16", mean_wire="bf16", kernels="eager").validate()
    with pytest.raises(ValueError, match="kernels='eager'"):
        casts = {"wire": "bf16", "mean_wire": "bf16", "factor_wire": "fp32"}
        plain_low_rank(**casts, kernels="eager").validate()


def test_a_user_is_told_what_travels_in_factors(caplog: pytest.LogCaptureFixture) -> None:
    """Per fragment, and with a warning where there is nothing to factor in the whole model."""
    model = torch.nn.ModuleDict(
        {"wte": torch.nn.Embedding(64, 48), "up": torch.nn.Linear(96, 80), "norm": LayerNorm(80)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapter = TorchAdapter(model, optimizer, ByLayer(), 1)
    method = preset("diloco", compression={"type": "low_rank", "rank": 4})
    taken = {name for names, _ in factored(method, adapter) for name in names}
    rest = {name for _, names in factored(method, adapter) for name in names}
    assert (taken, rest) == ({"up.weight"}, {"wte.weight"})
    with caplog.at_level(logging.INFO):
        tell_what_is_factored(method, adapter)
    assert "1 matrices travel in factors" in caplog.text
    assert "0 matrices travel in factors; as codes: wte.weight" in caplog.text
    too_much = preset("diloco", compression={"type": "low_rank", "rank": 64})
    with pytest.warns(SettingWarning, match="finds no matrix to factor .* lower compression.rank"):
        tell_what_is_factored(too_much, adapter)
    assert not factored(preset("diloco"), adapter)
