"""The mean of coded data: equal bits, the value of a naive oracle, the bytes and errors promised.

The oracle codes whole vectors with tests/compress/wire/reference.py and knows nothing of slices:
they are cut at whole groups, so who owns which cannot change the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dsx.compress.averaging import CodedMean, ExactMean
from dsx.compress.error_feedback import Residual
from dsx.compress.slices import SENT, coded_rounds, exact_rounds, gathered_rounds
from dsx.compress.wire.formats import FORMATS
from dsx.core.membership import Seat
from tests.compress.channels import bits, correlated, drive, exact_mean, nmse
from tests.compress.wire import reference

GROUPS = {"int4": 64, "int8": 256, "ternary": 64, "fp4_e2m1": 64, "fp4_e3m0": 64, "fp8": 256}


def coded_means(
    values: list[Tensor], wire: str = "int4", mean_wire: str = "int8", is_gathered: bool = False
) -> tuple[list[Tensor], list[int], list[int]]:
    """Every cluster's mean, the bytes each sent, and the bytes each said it would."""
    num_clusters = len(values)
    means = [
        CodedMean(
            values[0].numel(),
            FORMATS[wire](),
            FORMATS[mean_wire](),
            Seat.of(m, num_clusters),
            is_gathered=is_gathered,
        )
        for m in range(num_clusters)
    ]
    exchanges = [mean.exchange(x.clone()) for mean, x in zip(means, values, strict=True)]
    results, sent = drive(exchanges)
    up, down, numel = FORMATS[wire](), FORMATS[mean_wire](), values[0].numel()
    rounds = coded_rounds(numel, up, down, num_clusters)
    if is_gathered:
        rounds = gathered_rounds(numel, up, num_clusters)
    return results, sent, rounds[:, :, SENT].sum(axis=0).tolist()


def as_decoded(wire: str, x: Tensor) -> Tensor:
    """What arrives of a vector, by the naive formats."""
    if not x.numel() or wire == "fp32":
        return x.clone()
    if wire == "bf16":
        return x.bfloat16().float()
    ranks, scales = reference.encode(wire, x, GROUPS[wire])
    return reference.decode(wire, ranks, scales, GROUPS[wire])


def expected_mean(values: list[Tensor], wire: str, mean_wire: str | None) -> Tensor:
    """Decode each, sum in cluster order, divide; then code that once more if there is an owner."""
    total = as_decoded(wire, values[0])
    for value in values[1:]:
        total = total + as_decoded(wire, value)
    mean = total / len(values)
    return mean if mean_wire is None else as_decoded(mean_wire, mean)


def test_an_exact_mean_takes_the_rounds_a_plan_counts() -> None:
    for num_clusters, rounds in ((1, 0), (2, 1), (3, 2), (7, 2)):
        assert rounds == len(exact_rounds(9, num_clusters))
        mean = ExactMean(Seat.of(0, num_clusters))
        found = [
            round.bytes_sent(Seat.of(0, num_clusters)) for round in mean.exchange(torch.zeros(9))
        ]
        assert len(found) == rounds
        assert sum(found) == mean.bytes_sent(9)


KINDS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "gaussian": lambda values: values,
    "zero": lambda values: [torch.zeros_like(x) for x in values],
    "negative": lambda values: [-x.abs() - 0.1 for x in values],
    "one cluster zero": lambda values: [torch.zeros_like(values[0]), *values[1:]],
    "tiny and huge": lambda values: [x * 10.0 ** (20 * (m % 3 - 1)) for m, x in enumerate(values)],
}


@pytest.mark.parametrize("num_clusters", [1, 2, 3, 4, 5, 8, 32])
@pytest.mark.parametrize("numel", [0, 1, 3, 63, 257, 1500])
@pytest.mark.parametrize("kind", KINDS)
def test_all_clusters_decode_the_mean_of_the_codes(
    kind: str, numel: int, num_clusters: int
) -> None:
    if num_clusters == 32 and numel == 1500 and kind != "gaussian":
        numel = 300  # the oracle is slow
    values = KINDS[kind](correlated(numel, num_clusters))
    means, sent, declared = coded_means(values)
    expected = expected_mean(values, "int4", None if num_clusters <= 3 else "int8")
    assert all(torch.equal(mean, expected) for mean in means)
    assert sent == declared


@given(
    numel=st.integers(0, 1400),
    num_clusters=st.integers(1, 6),
    wire=st.sampled_from(["int4", "int8", "ternary", "fp4_e2m1", "fp4_e3m0", "fp8", "bf16"]),
    mean_wire=st.sampled_from(["int8", "int4", "bf16", "fp32"]),
    seed=st.integers(0, 99),
)
@example(numel=1149, num_clusters=4, wire="fp4_e3m0", mean_wire="int4", seed=4)  # 1 ulp off a tie
@example(numel=1023, num_clusters=1, wire="fp8", mean_wire="int8", seed=91)  # 3 ulp off one
def test_any_pair_of_formats(
    numel: int, num_clusters: int, wire: str, mean_wire: str, seed: int
) -> None:
    values = correlated(numel, num_clusters, seed)
    means, sent, declared = coded_means(values, wire, mean_wire)
    expected = expected_mean(values, wire, None if num_clusters <= 3 else mean_wire)
    assert all(torch.equal(bits(mean), bits(means[0])) for mean in means)
    assert torch.equal(means[0], expected)
    assert sent == declared


@pytest.mark.parametrize("num_clusters", [1, 4, 5])
def test_what_is_short_may_be_gathered_by_any_number(num_clusters: int) -> None:
    values = correlated(777, num_clusters)
    means, sent, declared = coded_means(values, "bf16", "bf16", is_gathered=True)
    assert all(torch.equal(mean, expected_mean(values, "bf16", None)) for mean in means)
    assert sent == declared == [777 * 2 * (num_clusters - 1)] * num_clusters


@pytest.mark.parametrize("num_clusters", [1, 2, 3, 4, 5, 8, 32])
@pytest.mark.parametrize("numel", [0, 1, 3, 1501])
def test_the_exact_mean_is_that_in_cluster_order(numel: int, num_clusters: int) -> None:
    values = KINDS["negative"](correlated(numel, num_clusters))
    exchanges = [
        ExactMean(Seat.of(m, num_clusters)).exchange(x.clone()) for m, x in enumerate(values)
    ]
    means, sent = drive(exchanges)
    assert all(torch.equal(mean, expected_mean(values, "fp32", None)) for mean in means)
    assert sent == [
        ExactMean(Seat.of(m, num_clusters)).bytes_sent(numel) for m in range(num_clusters)
    ]


@pytest.mark.parametrize(
    ("num_clusters", "per_element"),
    [(2, 0.53), (4, 1.15), (8, 1.35), (16, 1.44), (32, 1.49)],
)
def test_bytes_per_element(num_clusters: int, per_element: float) -> None:
    numel = 2**19
    up, down = 4 + 16 / 64, 8 + 16 / 256  # bits
    exact = (
        (num_clusters - 1) * up / 8
        if num_clusters <= 3
        else (num_clusters - 1) / num_clusters * (up + down) / 8
    )
    assert exact == pytest.approx(per_element, abs=0.006)
    rounds = coded_rounds(numel, FORMATS["int4"](), FORMATS["int8"](), num_clusters)
    for sent in rounds[:, :, SENT].sum(axis=0):
        assert sent / numel == pytest.approx(exact, rel=0.005)


@pytest.mark.parametrize(("num_clusters", "limit"), [(2, 0.009), (4, 0.009), (32, 0.002)])
def test_the_error_shrinks_with_the_number_of_clusters(num_clusters: int, limit: float) -> None:
    """And would not if the owner's mean took four bits, which shows that the limit is one."""
    values = correlated(2**15, num_clusters)
    exact = exact_mean(values)
    assert nmse(coded_means(values)[0][0], exact) <= limit
    if num_clusters > 3:
        assert nmse(coded_means(values, mean_wire="int4")[0][0], exact) > limit


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_clusters", [2, 4])
@pytest.mark.parametrize("wire", ["int4", "ternary"])
def test_the_number_of_threads_changes_no_bit(
    wire: str, num_clusters: int, threads: Callable[[int], None]
) -> None:
    values = correlated(2**17 + 77, num_clusters)
    threads(1)
    one = coded_means(values, wire)[0][0]
    threads(2)
    assert torch.equal(bits(coded_means(values, wire)[0][0]), bits(one))


@pytest.mark.parametrize("num_clusters", [1, 3, 5])
def test_the_residual_is_what_the_own_codes_lose(num_clusters: int) -> None:
    """In slices or not; added before, replaced after."""
    numel = 1333
    values = correlated(numel, num_clusters)
    before = correlated(numel, num_clusters, seed=1)
    means = [
        CodedMean(numel, FORMATS["int4"](), FORMATS["int8"](), Seat.of(m, num_clusters))
        for m in range(num_clusters)
    ]
    residuals = [Residual(numel, "fp32", 1.0) for _ in range(num_clusters)]
    for residual, start in zip(residuals, before, strict=True):
        residual.stored.copy_(start)
    drive(
        [
            mean.exchange(x.clone(), residual)
            for mean, x, residual in zip(means, values, residuals, strict=True)
        ]
    )
    for x, start, residual in zip(values, before, residuals, strict=True):
        assert torch.equal(residual.stored, (x + start) - as_decoded("int4", x + start))
