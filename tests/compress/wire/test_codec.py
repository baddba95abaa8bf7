"""Every format against the naive reference, and the algebra of the four operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsx.compress.wire.base import Wire
from dsx.compress.wire.formats import FORMATS
from tests.compress.wire import reference

CPU = torch.device("cpu")
GROUPED = sorted(reference.GRIDS)
NEAREST_ONLY = ("ternary", *reference.LEVELS)
SIZES = [0, 1, 2, 31, 63, 64, 65, 127, 319, 320, 321, 1000]


def make(name: str, **options: Any) -> Wire:
    wire = FORMATS[name](**options)
    wire.validate()
    return wire


def roundtrip(wire: Wire, x: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    codec = wire.codec(x.numel(), CPU, "eager")
    data = torch.full((wire.num_bytes(x.numel()),), 0xA5, dtype=torch.uint8)
    out = torch.full_like(x, torch.nan)
    codec.encode(x, data, seed)
    codec.decode(data, out)
    return data, out


def sample(numel: int, seed: int, kind: str = "heavy") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    if kind == "heavy":
        return x * x.abs().square() * torch.rand(numel, generator=generator)
    if kind == "negative":
        return -x.abs()
    if kind == "tiny":
        return x * 1e-42
    if kind == "huge":
        return (x * 1e38).clamp(-3e38, 3e38)
    return x


def scales_of(wire: Any, data: Tensor, numel: int) -> Tensor:
    """The scale of every element."""
    groups = -(-numel // wire.group_size)
    scales = data[data.numel() - 2 * groups :].clone().view(torch.bfloat16).float()
    return scales.repeat_interleave(wire.group_size)[:numel]


@pytest.mark.parametrize("name", GROUPED)
@given(
    numel=st.integers(1, 700),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(["heavy", "negative", "tiny", "huge", "normal"]),
    group_size=st.sampled_from([32, 64, 256]),
)
@example(numel=1, seed=0, kind="negative", group_size=32)
@example(numel=64, seed=0, kind="tiny", group_size=64)
@example(numel=65, seed=0, kind="huge", group_size=64)
@settings(max_examples=25, derandomize=True)
def test_messages_and_values_are_the_references(
    name: str, numel: int, seed: int, kind: str, group_size: int
) -> None:
    x = sample(numel, seed, kind)
    data, decoded = roundtrip(make(name, group_size=group_size), x)
    expected_data, expected = reference.message(name, x, group_size)
    assert torch.equal(data, expected_data)
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_casts_are_torchs(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([sample(1000, 0), sample(9, 1, "tiny"), torch.tensor([65504.0, -1e-30])])
    data, decoded = roundtrip(make(name), x)
    assert torch.equal(data.view(dtype), x.to(dtype))
    assert torch.equal(decoded, x.to(dtype).float())


def test_fp16_saturates_and_fp32_is_exact() -> None:
    x = torch.tensor([1e38, -1e6, 3.0, 1e-45])
    assert roundtrip(make("fp16"), x)[1].tolist() == [65504.0, -65504.0, 3.0, 0.0]
    assert torch.equal(roundtrip(make("fp32"), x)[1], x)
    assert [name for name in FORMATS if make(name).is_exact] == ["fp32"]


@pytest.mark.parametrize("numel", SIZES)
def test_byte_counts(numel: int) -> None:
    def up(a: int, b: int) -> int:
        return -(-a // b)

    expected = {
        "fp32": 4 * numel,
        "bf16": 2 * numel,
        "fp16": 2 * numel,
        "int8": numel + 2 * up(numel, 64),
        "fp8": numel + 2 * up(numel, 64),
        "int4": up(numel, 2) + 2 * up(numel, 64),
        "fp4_e2m1": up(numel, 2) + 2 * up(numel, 64),
        "fp4_e3m0": up(numel, 2) + 2 * up(numel, 64),
        "ternary": up(numel, 5) + 2 * up(numel, 64),
        "3bit": 3 * up(numel, 8) + 2 * up(numel, 64),
        "2bit": up(numel, 4) + 2 * up(numel, 64),
        "1bit": up(numel, 8) + 2 * up(numel, 64),
    }
    for name, num_bytes in expected.items():
        options = {"group_size": 64} if name in GROUPED else {}
        assert make(name, **options).num_bytes(numel) == num_bytes, name


def test_bytes_per_element_of_full_groups() -> None:
    numel = 64 * 5 * 256
    for name, group_size, expected in (
        ("int4", 64, 0.53125),
        ("int8", 256, 1.0078125),
        ("int8", 64, 1.03125),
        ("fp4_e2m1", 32, 0.5625),
        ("ternary", 64, 0.23125),
        ("3bit", 64, 3.25 / 8),
        ("2bit", 64, 2.25 / 8),
        ("1bit", 256, 1.0625 / 8),
    ):
        assert make(name, group_size=group_size).num_bytes(numel) == expected * numel


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("numel", SIZES)
def test_decode_add_is_decode_then_add_at_any_address(name: str, numel: int) -> None:
    wire = make(name)
    x, start = sample(numel, 2), sample(numel, 3)
    data, decoded = roundtrip(wire, x)
    moved = torch.empty(data.numel() + 1, dtype=torch.uint8)[1:].copy_(data)
    total = start.clone()
    wire.codec(numel, CPU, "eager").decode_add(moved, total)
    assert torch.equal(total, start + decoded)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("numel", [0, 1, 65, 1000, 2**17 + 321])
def test_feedback_keeps_what_is_lost(name: str, numel: int, rounding: str) -> None:
    if rounding == "stochastic" and name not in GROUPED or name in NEAREST_ONLY:
        return
    wire = make(name, rounding=rounding) if name in GROUPED else make(name)
    delta, before = sample(numel, 4, "normal"), sample(numel, 5, "normal")
    x, residual = delta.clone(), before.clone()
    data = torch.empty(wire.num_bytes(numel), dtype=torch.uint8)
    wire.codec(numel, CPU, "eager").encode_with_feedback(x, residual, data, seed=3)
    plain, decoded = roundtrip(wire, delta + before, seed=3)
    assert torch.equal(data, plain)
    assert torch.equal(x, delta + before)
    assert torch.equal(residual, x - decoded)
    torch.testing.assert_close(decoded + residual, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("kind", ["heavy", "negative", "tiny", "huge"])
def test_error_bounds(name: str, kind: str) -> None:
    wire = make(name)
    x = sample(4099, 6, kind)
    data, decoded = roundtrip(wire, x)
    error, half = (x.double() - decoded.double()).abs(), scales_of(wire, data, 4099).double() / 2
    assert decoded.isfinite().all()
    slack = 1 + 1e-5
    if name.startswith("int"):
        assert (error <= half * slack).all()
    elif name == "fp4_e3m0":
        assert (error <= (x.double().abs() / 3 + half) * slack).all()
    elif name == "fp8":
        assert (error <= (x.double().abs() / 16 + half / 8) * slack).all()


@pytest.mark.parametrize(
    ("name", "group_size", "bound"),
    [
        ("int8", 256, 6e-5),
        ("int4", 32, 0.0100),
        ("int4", 64, 0.0122),
        ("int4", 128, 0.0145),
        ("fp4_e2m1", 32, 0.0108),
        ("fp4_e2m1", 64, 0.0118),
        ("fp4_e3m0", 64, 0.037),
        ("fp8", 256, 8e-4),
        ("ternary", 64, 0.19),
        ("3bit", 64, 0.0345),  # without a group's own scale: 0.03454, 0.1175, 0.3634
        ("2bit", 64, 0.1175),
        ("1bit", 256, 0.3634),
    ],
)
def test_gaussian_error(name: str, group_size: int, bound: float) -> None:
    x = sample(2**18, 7, "normal")
    decoded = roundtrip(make(name, group_size=group_size), x)[1]
    assert 0.5 * bound < float((x - decoded).square().sum() / x.square().sum()) <= bound


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_zeros_stay_zeros(name: str) -> None:
    decoded = roundtrip(make(name), torch.zeros(1000))[1]
    assert torch.equal(decoded, torch.zeros(1000))


@pytest.mark.parametrize("name", GROUPED)
def test_the_largest_number_stays_finite(name: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, largest / 2, 0.0]).repeat(64)
    decoded = roundtrip(make(name), x)[1]
    assert decoded.isfinite().all()
    rtol = {"ternary": 0.2, "1bit": 0.4}.get(name, 0.01)
    torch.testing.assert_close(decoded[0::4], x[0::4], rtol=rtol, atol=0)
    assert torch.equal(decoded[0::4], -decoded[1::4])


@pytest.mark.parametrize("name", [name for name in GROUPED if name not in NEAREST_ONLY])
def test_stochastic_rounding_is_unbiased_and_follows_the_seed(name: str) -> None:
    wire = make(name, rounding="stochastic")
    x = sample(4096, 8, "normal")
    data = torch.stack([roundtrip(wire, x, seed)[0] for seed in range(256)])
    assert torch.equal(roundtrip(wire, x, 5)[0], data[5])
    assert len(torch.unique(data, dim=0)) == 256
    out = torch.empty_like(x)
    errors: list[Tensor] = []
    for message in data:
        wire.codec(4096, CPU, "eager").decode(message, out)
        errors.append(out - x)
    error = torch.stack(errors)
    # The mean of 256 independent draws has 1/256 of their variance, bias would add to it.
    assert 0.9 < float(error.mean(dim=0).square().sum() / (error.var(dim=0).sum() / 256)) < 1.1
    assert abs(float(error.mean())) < 4 * float(error.std()) / error.numel() ** 0.5


def test_a_tile_more_changes_nothing_before_it() -> None:
    """The noise of an element depends on its index alone, so tiles do not show."""
    wire = make("int4", rounding="stochastic")
    x = sample(2**17 + 640, 9, "normal")
    whole = roundtrip(wire, x, seed=1)[1]
    assert torch.equal(roundtrip(wire, x[: 2**17], seed=1)[1], whole[: 2**17])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int4", {"group_size": 48}, r"int4.group_size=48 must be one of 32, .*; try"),
        ("ternary", {"group_size": 512}, r"ternary.group_size=512 .*; try 256"),
        ("int8", {"rounding": "up"}, r"int8.rounding='up' is not known; allowed: 'nearest'"),
    ],
)
def test_values_out_of_range(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FORMATS[name](**options).validate()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_sizes_that_do_not_match(name: str) -> None:
    wire = make(name)
    codec = wire.codec(64, CPU)
    with pytest.raises(ValueError, match="longer than the codec's numel=64"):
        codec.encode(torch.zeros(65), torch.zeros(wire.num_bytes(65), dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"which take {wire.num_bytes(64)}; cut the buffer"):
        codec.decode(torch.zeros(wire.num_bytes(64) + 1, dtype=torch.uint8), torch.zeros(64))
    with pytest.raises(ValueError, match="kernels='fast' is not known"):
        wire.codec(64, CPU, "fast")  # type: ignore[arg-type]
