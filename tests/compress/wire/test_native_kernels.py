"""Native kernels write the bits of the eager ones, whatever the values and the instruction set."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsx.compress.wire.base import Codec
from dsx.compress.wire.formats import FORMATS, GROUP_SIZES, Int4, Int8
from dsx.compress.wire.native import library
from dsx.compress.wire.native_codec import NativeCodec
from tests.compress.wire.installed_kernels import native  # noqa: F401  # pyright: ignore

pytestmark = pytest.mark.usefixtures("native")

CPU = torch.device("cpu")
KINDS = ("normal", "heavy", "spread", "subnormal", "tiny", "huge", "ties", "zeros", "nan", "inf")
ROUNDED = ("int8", "int4", "fp8", "fp4_e2m1", "fp4_e3m0")
VARIANTS = [*((name, "nearest") for name in library.KINDS), *((n, "stochastic") for n in ROUNDED)]


def sample(numel: int, seed: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, chance = torch.randn(numel, generator=generator), torch.rand(numel, generator=generator)
    match kind:
        case "heavy":
            return x * x.abs().square() * chance
        case "spread":  # over the range of fp32, so that groups end at either bound of a scale
            return x * 10 ** (76 * chance - 40)
        case "subnormal":
            return x * 1e-42
        case "tiny":
            return x * 1e-33
        case "huge":
            return (x * 1e38).clamp(-3.4028234e38, 3.4028234e38)
        case "ties":
            return (x * 16).round() / 2
        case "zeros":
            x = torch.where(chance > 0.9, x, torch.zeros(()).copysign(x))
            x[:300] *= 0
        case "nan":
            x[chance > 0.99] = torch.nan
        case "inf":
            x[chance > 0.98] = torch.inf
            x[chance > 0.99] = -torch.inf
        case _:
            pass
    return x


def make(name: str, rounding: str, group_size: int) -> Any:
    options = {"rounding": rounding} if name in ROUNDED else {}
    return FORMATS[name](group_size=group_size, **options)  # type: ignore[call-arg]


def outcomes(codec: Codec, num_bytes: int, x: Tensor, residual: Tensor) -> list[Tensor]:
    """Everything the four operations write; messages at odd addresses, what is beside them."""
    codes, fed = (torch.full((num_bytes + 2,), 0xA5, dtype=torch.uint8) for _ in range(2))
    out, total, own, lost = x.clone().zero_(), residual.clone(), x.clone(), residual.clone()
    codec.encode(x, codes[1:-1], seed=7)
    codec.decode(codes[1:-1], out)
    codec.decode_add(codes[1:-1], total)
    codec.encode_with_feedback(own, lost, fed[1:-1], seed=2**40 + 8)
    return [codes, out, total, fed, own, lost]


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor], what: object) -> None:
    """Bit for bit; of a NaN that it is one, since the order of operands picks its payload."""
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.dtype is torch.float32:
            same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
        else:
            same = a == b
        assert bool(same.all()), (what, k, int((~same).nonzero()[0]))


@pytest.mark.parametrize(("name", "rounding"), VARIANTS)
@given(
    numel=st.one_of(st.integers(0, 700), st.integers(700, 6000)),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
    group_size=st.sampled_from(GROUP_SIZES),
)
@settings(max_examples=20, derandomize=True, deadline=None)
def test_bits_are_those_of_eager_kernels(
    name: str, rounding: str, numel: int, seed: int, kind: str, group_size: int
) -> None:
    wire = make(name, rounding, group_size)
    x = sample(numel, seed, kind)
    residual = sample(numel, seed + 1, "normal") * x.abs().nan_to_num(0, 1, 1).mean()
    size = wire.num_bytes(numel)
    eager = outcomes(wire.codec(numel, CPU, "eager"), size, x, residual)
    for instructions in library.instruction_sets():
        codec = NativeCodec(name, wire.form, numel, instructions)
        own = outcomes(codec, size, x, residual)
        assert_same_bits(own, eager, (instructions, numel, seed, kind, group_size))


@pytest.mark.ci
@pytest.mark.parametrize(("name", "rounding"), VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_long_vectors_are_the_same_bits(name: str, rounding: str, kind: str) -> None:
    """Of several tiles and the last batch of groups cut anywhere."""
    sizes = 2**17 + 31, 70001, 2**18 + 5 * 128, 99999
    for group_size, numel in zip(GROUP_SIZES, sizes, strict=True):
        wire = make(name, rounding, group_size)
        x, residual = sample(numel, 1, kind), sample(numel, 2, "normal")
        size = wire.num_bytes(numel)
        eager = outcomes(wire.codec(numel, CPU, "eager"), size, x, residual)
        for instructions in library.instruction_sets():
            codec = NativeCodec(name, wire.form, numel, instructions)
            assert_same_bits(outcomes(codec, size, x, residual), eager, (instructions, group_size))


@pytest.mark.parametrize("name", library.KINDS)
def test_any_bytes_decode_to_the_same_bits(name: str) -> None:
    """A message is another cluster's: each byte, and scales that no encoder writes."""
    wire = FORMATS[name]()
    numel = 4077
    generator = torch.Generator().manual_seed(0)
    for message in range(8):
        shape = (wire.num_bytes(numel),)
        data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        data[:256] = torch.arange(256).add(message).to(torch.uint8)
        eager, out = torch.zeros(2, numel).unbind()
        wire.codec(numel, CPU, "eager").decode(data, eager)
        for instructions in library.instruction_sets():
            NativeCodec(name, wire.form, numel, instructions).decode(data, out)  # type: ignore[attr-defined]
            assert_same_bits([out], [eager], (instructions, message))


def test_instruction_sets_are_named() -> None:
    allowed = ", ".join(library.instruction_sets())
    with pytest.raises(ValueError, match=f"instruction set 'mmx' is not known.* {allowed}"):
        NativeCodec("int4", Int4().form, 10, "mmx")


@pytest.mark.parametrize(
    "x", [torch.zeros(64, dtype=torch.float64), torch.zeros(128)[::2], torch.zeros(64).bfloat16()]
)
def test_what_is_no_vector_of_fp32_is_refused(x: Tensor) -> None:
    data = torch.zeros(Int4().num_bytes(64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="must be contiguous, of torch.float32 and on the CPU"):
        Int4().codec(64, CPU, "native").decode(data, x)
    with pytest.raises(ValueError, match=r"of strides \(2,\) on cpu must be contiguous"):
        Int4().codec(64, CPU, "native").encode(torch.zeros(64), torch.cat([data] * 2)[::2])


def test_other_threads_run_meanwhile() -> None:
    """Were the lock held, no line of Python would run between a call's start and its end."""
    numel = 2**24
    codec, x = Int8().codec(numel, CPU, "native"), torch.ones(numel)
    data = torch.empty(Int8().num_bytes(numel), dtype=torch.uint8)
    codec.encode(x, data)
    spans: list[tuple[float, float]] = []

    def calls() -> None:
        for _ in range(5):
            start = time.perf_counter()
            codec.encode(x, data)
            spans.append((start, time.perf_counter()))

    thread, ticks = threading.Thread(target=calls), list[float]()
    before = sys.getswitchinterval()
    sys.setswitchinterval(10)  # so that nobody is asked to give the lock up
    try:
        thread.start()
        while thread.is_alive():
            ticks.append(time.perf_counter())
            thread.join(1e-4)
    finally:
        sys.setswitchinterval(before)
    assert any(start < tick < end for start, end in spans for tick in ticks)


def test_the_library_is_called_without_torch() -> None:
    """Plans ask whether it is there, and are started without."""
    code = (
        "import sys; from dsx.compress.wire.native import library\n"
        "print(library.instruction_sets()[-1], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [library.instruction_sets()[-1], "False"]


def test_a_residual_of_another_length_is_refused() -> None:
    """The kernels are given an address, and would write beyond it."""
    codec = Int8().codec(1024, CPU, "native")
    x, out = torch.ones(1024), torch.zeros(Int8().num_bytes(1024), dtype=torch.uint8)
    with pytest.raises(ValueError, match="a residual of 10 elements beside a vector of 1024"):
        codec.encode_with_feedback(x, torch.zeros(10), out)


def test_a_change_of_the_kernels_has_a_version_of_its_own() -> None:
    """A library of before would be called on as if it were of these sources."""
    folder = Path(library.__file__).parent
    sources = b"".join(file.read_bytes() for file in sorted(folder.glob("*.[ch]")))
    version = re.search(rb"int dsx_wire_version\(void\)\s*{\s*return (\d+);", sources)
    assert version is not None and int(version[1]) == library.VERSION
    assert (library.VERSION, crc32(sources)) == (2, 3408930077), (
        "raise the version in both places, and write it and the sum here"
    )
