"""Quantized channels: what travels how, error feedback, state, and settings that cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsx.compress.quantized import Quantized
from dsx.core.types import Fragment, Slot
from tests.compress.channels import (
    Clusters,
    bits,
    correlated,
    exact_mean,
    fragment_of,
)
from tests.compress.wire import reference

# Coded: w1, w2 as one run, w5. Small: a vector, a long vector, a matrix of 1023.
SHAPES = [(70,), (40, 30), (32, 40), (2000,), (33, 31), (8, 16, 9)]
FRAGMENT = fragment_of(*SHAPES)
CODED, SMALL = [(70, 2550), (5573, 6725)], [(0, 70), (2550, 5573)]


def decoded(name: str, x: Tensor, group_size: int) -> Tensor:
    ranks, scales = reference.encode(name, x, group_size)
    return reference.decode(name, ranks, scales, group_size)


def mean_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total / len(parts)


def test_the_layout_is_as_the_tests_say() -> None:
    assert FRAGMENT.numel == 6725
    assert [s.offset for s in FRAGMENT.layout] == [0, 70, 1270, 2550, 4550, 5573]


@pytest.mark.parametrize("num_clusters", [1, 2, 4, 5])
@pytest.mark.parametrize("small_wire", ["bf16", "fp32"])
def test_small_slots_are_the_mean_of_their_casts(small_wire: Any, num_clusters: int) -> None:
    clusters = Clusters(Quantized(small_wire=small_wire), FRAGMENT, num_clusters)
    values = correlated(FRAGMENT.numel, num_clusters)
    mean = clusters.average(values)
    casts = [x.bfloat16().float() if small_wire == "bf16" else x for x in values]
    expected = mean_in_order(casts)
    for start, stop in SMALL:
        assert torch.equal(mean[start:stop], expected[start:stop])


@pytest.mark.parametrize("num_clusters", [1, 2, 4, 5])
@pytest.mark.parametrize(
    ("wire", "group_size"), [("int4", 64), ("int4", 32), ("ternary", 128), ("2bit", 64)]
)
def test_matrices_are_coded_in_runs(wire: Any, group_size: int, num_clusters: int) -> None:
    """Neighbours share groups; where there is an owner, the mean is coded once more."""
    method = Quantized(wire=wire, group_size=group_size)
    clusters = Clusters(method, FRAGMENT, num_clusters)
    values = correlated(FRAGMENT.numel, num_clusters)
    mean = clusters.average(values)
    for start, stop in CODED:
        expected = mean_in_order([decoded(wire, x[start:stop], group_size) for x in values])
        if num_clusters > 3:
            expected = decoded("int8", expected, 256)
        assert torch.equal(mean[start:stop], expected)


@pytest.mark.parametrize("num_clusters", [1, 2, 5])
def test_declared_bytes_are_sent(num_clusters: int) -> None:
    clusters = Clusters(Quantized(), FRAGMENT, num_clusters)
    clusters.average(correlated(FRAGMENT.numel, num_clusters))
    assert clusters.bytes_sent == clusters.payload_bytes(1)
    if num_clusters == 2:
        small, coded = 70 + 2000 + 1023, [2480, 1152]
        groups = [-(-n // 64) for n in coded]
        assert clusters.bytes_sent[0] == 2 * small + sum(coded) // 2 + 2 * sum(groups)


def test_a_part_of_a_matrix_is_coded_and_a_part_of_a_small_one_is_not() -> None:
    """What counts is the whole parameter's size, so that all ranks of a cluster treat it alike."""
    layout = (
        Slot("part", (900,), 0, start=64, whole=(64, 64)),
        Slot("small", (500,), 900, start=0, whole=(31, 33)),
    )
    values = correlated(1400, 2)
    mean = Clusters(Quantized(), Fragment(0, 0, layout), 2).average(values)
    expected = mean_in_order([decoded("int4", x[:900], 64) for x in values])
    assert torch.equal(mean[:900], expected)
    assert torch.equal(mean[900:], mean_in_order([x[900:].bfloat16().float() for x in values]))


def test_rounding_to_chance_differs_by_cluster_part_and_round() -> None:
    """Equal inputs, so that only the noise differs; and its mean is the input's."""
    fragment = fragment_of((64, 64), (70,), (64, 64))
    x = correlated(64 * 64, 1)[0]
    value = torch.cat([x, torch.zeros(70), x])
    one = Clusters(Quantized(rounding="stochastic"), fragment, 1)
    rounds = [one.average([value]) for _ in range(2)]
    two = Clusters(Quantized(rounding="stochastic"), fragment, 2).average([value, value])
    assert not torch.equal(rounds[0][:4096], rounds[1][:4096])
    assert not torch.equal(rounds[0][:4096], rounds[0][-4096:])
    assert not torch.equal(two[:4096], rounds[0][:4096])
    again = Clusters(Quantized(rounding="stochastic"), fragment, 1)
    assert torch.equal(again.average([value]), rounds[0])


def rounds_of(num_clusters: int, num_rounds: int) -> list[list[Tensor]]:
    return [correlated(FRAGMENT.numel, num_clusters, seed=r) for r in range(num_rounds)]


def residual_of(clusters: Clusters, index: int, channel: int = 0) -> Tensor:
    return clusters.channels[channel].slots[f"residual.{index}"]


@pytest.mark.parametrize("wire", ["int4", "ternary", "1bit"])
@pytest.mark.parametrize("num_clusters", [1, 2, 5])
def test_what_is_applied_and_what_is_left_is_what_was_put_in(num_clusters: int, wire: Any) -> None:
    """What owners keep of the means they encode is left, too, where there are means to encode."""
    clusters = Clusters(Quantized(wire=wire, error_feedback="fp32"), FRAGMENT, num_clusters)
    inputs = rounds_of(num_clusters, 8)
    applied = torch.stack([clusters.average(values) for values in inputs]).double().sum(dim=0)
    total = sum(exact_mean(values) for values in inputs)
    for index, (start, stop) in enumerate(CODED):
        left = exact_mean([residual_of(clusters, index, m) for m in range(num_clusters)])
        if num_clusters > 3:
            slots = [channel.slots for channel in clusters.channels]
            of_means = torch.cat([s.get(f"residual.{index}.mean", torch.empty(0)) for s in slots])
            assert of_means.norm() > 1e-4 * total[start:stop].norm()
            left += of_means
        error = applied[start:stop] + left - total[start:stop]
        assert error.norm() <= 1e-5 * total[start:stop].norm()
        assert left.norm() > 1e-2 * total[start:stop].norm()  # and the residual is needed for it


@pytest.mark.parametrize("num_clusters", [1, 2])
@pytest.mark.parametrize(("storage", "lost_per_round"), [("bf16", 2.0**-8), ("int8", 1 / 127)])
def test_narrow_residuals_lose_no_more_than_their_own_rounding(
    storage: Any, lost_per_round: float, num_clusters: int
) -> None:
    """Per element and round: half a step of the storage, of the largest residual possible."""
    clusters = Clusters(Quantized(error_feedback=storage), FRAGMENT, num_clusters)
    inputs = rounds_of(num_clusters, 8)
    applied = torch.stack([clusters.average(values) for values in inputs]).double().sum(dim=0)
    total = sum(exact_mean(values) for values in inputs)
    largest = max(float(x.abs().max()) for values in inputs for x in values)
    residual = largest * (1 + 1 / 7) / 7 / 2 * 1.01  # half a step of int4, of x + residual
    for index, (start, stop) in enumerate(CODED):
        stored = [residual_of(clusters, index, m) for m in range(num_clusters)]
        left = exact_mean([unstored(storage, data, stop - start) for data in stored])
        error = (applied[start:stop] + left - total[start:stop]).abs().max()
        assert error <= len(inputs) * residual * lost_per_round / 2 * 1.01
        assert left.abs().max() > 4 * error


def unstored(storage: str, data: Tensor, numel: int) -> Tensor:
    if storage == "bf16":
        return data.view(torch.bfloat16).float()
    scales = data[numel:].view(torch.bfloat16).float().repeat_interleave(256)[:numel]
    return data[:numel].view(torch.int8) * scales


def test_without_feedback_there_is_no_state() -> None:
    assert not Clusters(Quantized(), FRAGMENT, 2).channels[0].slots


@pytest.mark.parametrize("decay", [1.0, 0.95, 0.5])
def test_the_residual_decays_before_it_is_added(decay: float) -> None:
    method = Quantized(error_feedback="fp32", feedback_decay=decay)
    clusters = Clusters(method, FRAGMENT, 1)
    (x,), (y,) = rounds_of(1, 2)
    clusters.average([x])
    mean = clusters.average([y])
    for index, (start, stop) in enumerate(CODED):
        first = x[start:stop] - decoded("int4", x[start:stop], 64)
        second = y[start:stop] + first * decay
        assert torch.equal(mean[start:stop], decoded("int4", second, 64))
        expected = second - mean[start:stop]
        assert torch.equal(residual_of(clusters, index), expected)


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("num_clusters", [1, 2, 5])
def test_state_is_all_that_a_channel_remembers(num_clusters: int, storage: Any) -> None:
    method = Quantized(
        rounding="stochastic", error_feedback=storage, feedback_decay=0.95, mean_wire="int4"
    )
    first = Clusters(method, FRAGMENT, num_clusters)
    inputs = rounds_of(num_clusters, 5)
    for values in inputs[:3]:
        first.average(values)
    second = first.resumed_by(Clusters(method, FRAGMENT, num_clusters))
    for values in inputs[3:]:
        assert torch.equal(bits(first.average(values)), bits(second.average(values)))
    for ours, theirs in zip(first.channels, second.channels, strict=True):
        assert len(ours.slots) == (2 if num_clusters <= 3 else 4)
        assert all(torch.equal(ours.slots[name], theirs.slots[name]) for name in ours.slots)


@pytest.mark.parametrize("wire", ["1bit", "2bit", "3bit"])
def test_owners_send_what_they_have_lost_of_means_with_the_next(wire: Any) -> None:
    """y = mean of codes + e; all apply what they decode of y; e = y - that. Without a residual of
    the values, and to the bit.
    """
    method = Quantized(wire=wire, mean_wire=wire, group_size=64)
    clusters = Clusters(method, FRAGMENT, 5)
    group_of_means = 256 if wire == "1bit" else 64
    lost = {run: torch.zeros(run[1] - run[0]) for run in CODED}
    for values in rounds_of(5, 4):
        mean = clusters.average(values)
        for start, stop in CODED:
            y = mean_in_order([decoded(wire, x[start:stop], 64) for x in values])
            y = y + lost[start, stop]
            assert torch.equal(mean[start:stop], decoded(wire, y, group_of_means))
            lost[start, stop] = y - mean[start:stop]
    slots = [channel.slots for channel in clusters.channels]
    for index, run in enumerate(CODED):
        kept = torch.cat([s.get(f"residual.{index}.mean", torch.empty(0)) for s in slots])
        assert torch.equal(kept, lost[run])
    assert all(name.endswith(".mean") for s in slots for name in s)
    sizes = [sum(t.numel() * 4 for t in s.values()) for s in slots]
    assert sizes == method.state_bytes(FRAGMENT, 5, 0) == method.before_bytes(FRAGMENT, 5, 0, 1)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, "none"),
        ({"error_feedback": "bf16"}, "bf16"),
        ({"mean_feedback": "fp32"}, "fp32"),
        ({"error_feedback": "bf16", "mean_feedback": "fp32"}, "fp32"),
        ({"error_feedback": "fp32", "mean_feedback": "none"}, "none"),
        ({"mean_wire": "2bit"}, "fp32"),
        ({"mean_wire": "2bit", "error_feedback": "int8"}, "int8"),
        ({"mean_wire": "2bit", "mean_feedback": "none"}, "none"),
    ],
)
def test_what_owners_keep_is_a_choice(fields: dict[str, Any], kept: str) -> None:
    method = Quantized(**fields)
    method.validate()
    clusters = Clusters(method, FRAGMENT, 4)
    clusters.average(correlated(FRAGMENT.numel, 4))
    found = {n: e for c in clusters.channels for n, e in c.errors.items() if e.is_of_mean}
    assert {error.residual.storage for error in found.values()} == {kept} - {"none"}
    sizes = [sum(t.nbytes for t in channel.slots.values()) for channel in clusters.channels]
    assert sizes == method.state_bytes(FRAGMENT, 4, 0)


def test_two_legs_of_2_bits_send_114_times_less_than_a_ring_in_bf16() -> None:
    """At H = 16, by 4 clusters, per parameter: 2 * 3/4 * 2.25 bits against 2 * 3/4 * 16 a step.

    Gathered codes, 3 * 2.25 bits, would be 57 times less.
    """
    fragment = fragment_of((64, 1024), (256, 512))
    clusters = Clusters(Quantized(wire="2bit", mean_wire="2bit"), fragment, 4)
    clusters.average(correlated(fragment.numel, 4))
    assert clusters.bytes_sent == clusters.payload_bytes(1)
    bits_sent = [8 * sent / fragment.numel for sent in clusters.bytes_sent]
    assert bits_sent == [2 * 0.75 * 2.25] * 4
    ring = 2 * 0.75 * 16
    assert 16 * ring / bits_sent[0] == pytest.approx(113.8, abs=0.1)
    assert 16 * ring / (3 * 2.25) == pytest.approx(56.9, abs=0.1)


SHAPE = st.one_of(
    st.tuples(st.integers(0, 80)),
    st.tuples(st.integers(1, 40), st.integers(1, 60)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 30)),
)


@given(
    shapes=st.lists(SHAPE, max_size=5),
    num_clusters=st.integers(1, 5),
    wire=st.sampled_from(["int4", "int8", "ternary", "3bit", "2bit", "1bit", "fp8", "fp16"]),
    feedback=st.sampled_from(["none", "fp32", "bf16", "int8"]),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
)
def test_any_layout(
    shapes: list[tuple[int, ...]], num_clusters: int, wire: Any, feedback: Any, scale: float
) -> None:
    """Equal bits, finite, declared bytes, and no further off than the coarsest code can be."""
    fragment = fragment_of(*shapes)
    clusters = Clusters(Quantized(wire=wire, error_feedback=feedback), fragment, num_clusters)
    values = [x * scale for x in correlated(fragment.numel, num_clusters)]
    for round in (1, 2):
        mean = clusters.average(values)
        assert mean.isfinite().all()
        assert clusters.bytes_sent == clusters.payload_bytes(round)
    largest = max((float(x.abs().max()) for x in values if x.numel()), default=0.0)
    assert not scale or not fragment.numel or (mean - exact_mean(values)).abs().max() <= 2 * largest


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"wire": "int5"}, r"compression\.wire='int5'"),
        ({"mean_wire": "int2"}, r"compression\.mean_wire='int2'"),
        ({"small_wire": "int8"}, r"compression\.small_wire='int8'"),
        ({"error_feedback": "fp16"}, r"compression\.error_feedback='fp16'"),
        ({"kernels": "fast"}, r"kernels='fast'"),
        ({"rounding": "down"}, r"rounding='down'"),
        ({"group_size": 100}, r"group_size=100 must be one of 32, 64, 128, 256; try 128"),
        ({"feedback_decay": 0.0}, r"compression\.feedback_decay=0\.0 must be above 0"),
        ({"feedback_decay": 1.5}, r"compression\.feedback_decay=1\.5 must be above 0"),
        ({"feedback_decay": float("nan")}, r"compression\.feedback_decay=nan"),
        ({"wire": "bf16", "group_size": 128}, "group_size=128: bf16 has no groups"),
        ({"wire": "fp32", "error_feedback": "bf16"}, "error_feedback='bf16': fp32 loses nothing"),
        (
            {"wire": "bf16", "mean_wire": "fp32", "kernels": "compiled"},
            "kernels='compiled': bf16 is a cast",
        ),
        ({"feedback_decay": 0.95}, "has no effect while compression.error_feedback='none'"),
        ({"wire": "ternary", "rounding": "stochastic"}, "ternary rounds to nearest only"),
        ({"wire": "bf16", "rounding": "stochastic"}, "bf16 rounds to nearest only"),
        ({"wire": "2bit", "rounding": "stochastic"}, "2bit rounds to nearest only"),
        ({"mean_feedback": "bf16"}, r"compression\.mean_feedback='bf16'"),
        ({"mean_wire": "fp32", "mean_feedback": "fp32"}, "a mean in fp32 loses nothing"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Quantized(**fields).validate()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"wire": "int8", "group_size": 256, "rounding": "stochastic"},
        {"wire": "ternary", "error_feedback": "bf16", "feedback_decay": 0.95},
        {"wire": "fp32", "mean_wire": "fp32", "small_wire": "fp32"},
        {"wire": "1bit", "mean_wire": "1bit", "group_size": 256},
    ],
)
def test_what_works_is_not(fields: dict[str, Any]) -> None:
    Quantized(**fields).validate()
