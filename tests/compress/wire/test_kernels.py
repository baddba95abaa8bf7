"""Where and how kernels run changes no bit: compiled or eager, threads, vector units; no leaks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsx.compress.wire import group_codec
from dsx.compress.wire.base import Wire
from dsx.compress.wire.compiled import unavailable
from dsx.compress.wire.formats import FORMATS, Int4
from tests.levels import by_default

CPU = torch.device("cpu")
NUMEL = 2 * 2**20 + 321  # two slices, then tiles, then a tail

needs_compiler = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module")
def compiler() -> None:
    """Compiles something, which is not for collecting tests."""
    if unavailable("cpu") is not None:
        pytest.skip(f"no C++ compiler: {unavailable('cpu')}")


def outcomes(wire: Wire, kernels: str, device: torch.device = CPU) -> list[Tensor]:
    """Everything the four operations write, for one input."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUMEL, generator=generator).to(device)
    x *= x.abs().square()
    x[:1000] = 0
    x[5000:6000] *= 1e-40
    residual = torch.randn(NUMEL, generator=generator).to(device)
    codec = wire.codec(NUMEL, device, kernels)  # type: ignore[arg-type]
    assert codec.kernels == kernels
    data, fed = (
        torch.zeros(wire.num_bytes(NUMEL), dtype=torch.uint8, device=device) for _ in range(2)
    )
    out, total = torch.empty_like(x), residual.clone()
    codec.encode(x, data, seed=7)
    codec.decode(data, out)
    codec.decode_add(data, total)
    codec.encode_with_feedback(x, residual, fed, seed=8)
    return [data, out, total, fed, x, residual]


@needs_compiler
@pytest.mark.parametrize(
    "wire",
    [
        Int4(),
        *(
            pytest.param(wire, marks=pytest.mark.slow)
            for name in ("int8", "int4", "fp8", "fp4_e2m1", "fp4_e3m0")
            for rounding in ("nearest", "stochastic")
            for wire in (FORMATS[name](rounding=rounding),)  # type: ignore[call-arg]
        ),
        *(
            pytest.param(FORMATS[name](), marks=pytest.mark.slow)
            for name in ("ternary", "3bit", "2bit", "1bit")
        ),
    ],
    ids=str,
)
def test_compiled_kernels_write_the_bits_of_eager_ones(wire: Wire) -> None:
    for compiled, eager in zip(outcomes(wire, "compiled"), outcomes(wire, "eager"), strict=True):
        assert torch.equal(compiled, eager)


@needs_compiler
@pytest.mark.slow
def test_threads_compile_and_run_side_by_side() -> None:
    """Every fragment has a thread of its own, and all may need a kernel for the first time."""
    numel, wire, cpu = 2**21 + 77, FORMATS["int4"](), torch.device("cpu")

    def work(seed: int) -> bool:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        message = torch.zeros(wire.num_bytes(numel), dtype=torch.uint8)
        values = {}
        for kernels in ("compiled", "eager"):
            codec, out = wire.codec(numel, cpu, kernels), torch.zeros(numel)  # type: ignore[arg-type]
            codec.encode_with_feedback(x.clone(), torch.zeros(numel), message)
            codec.decode(message, out)
            codec.decode_add(message, out)
            values[kernels] = out
        return torch.equal(values["compiled"], values["eager"])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith(("int", "fp4")) or "bit" in n])
@pytest.mark.parametrize("kernels", ["compiled", "eager"])
def test_a_gpu_writes_the_bits_of_a_cpu(name: str, kernels: str) -> None:
    wire = FORMATS[name]()
    gpu = outcomes(wire, kernels, torch.device("cuda"))
    for there, here in zip(gpu, outcomes(wire, "eager"), strict=True):
        assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("name", by_default(sorted(FORMATS), "int4", "ternary", "2bit"))
def test_one_thread_or_two(name: str) -> None:
    before = torch.get_num_threads()
    try:
        results: list[list[Tensor]] = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(outcomes(FORMATS[name](), "eager"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


DIGEST = """
import hashlib, torch
from dsx.compress.wire.formats import FORMATS
index = torch.arange(70001)  # not randn: that depends on the vector unit itself
x = (index * 2654435761 % 2**20 - 2**19).float() / 3 * (index % 37 + 1)
digest = hashlib.sha256()
for name in sorted(FORMATS):
    wire = FORMATS[name]()
    codec = wire.codec(len(x), x.device, "eager")
    data = torch.empty(wire.num_bytes(len(x)), dtype=torch.uint8)
    out, total = torch.empty_like(x), x.clone()
    codec.encode(x, data)
    codec.decode(data, out)
    codec.decode_add(data, total)
    for tensor in (data, out, total):
        digest.update(tensor.numpy().tobytes())
print(torch.backends.cpu.get_cpu_capability(), digest.hexdigest())
"""


@pytest.mark.ci
def test_every_vector_unit_writes_the_same_bytes() -> None:
    """Decoders must agree between CPUs; with these formulas the encoders do as well."""
    digests: dict[str, str] = {}
    levels = ["default", "avx2", "avx512"]  # a level that the processor lacks ends in SIGILL
    best = torch.backends.cpu.get_cpu_capability().lower()
    for capability in levels[: levels.index(best) + 1]:
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        run = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        used, digest = run.stdout.split()
        digests[used] = digest
    if len(digests) == 1:
        pytest.skip(f"this processor has one level only: {list(digests)}")
    assert len(set(digests.values())) == 1, digests


def allocated_bytes(call: Callable[[], None]) -> int:
    """All that torch allocates on the CPU during `call`, temporaries inside operations included."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    return sum(max(e.nbytes(), 0) for e in events if e.name() == "[memory]")


def test_the_measure_of_allocations_sees_temporaries() -> None:
    x = torch.ones(2**16)
    assert allocated_bytes(lambda: (x + 1).sum().item()) >= 4 * 2**16
    assert allocated_bytes(lambda: x.add_(x.bfloat16())) >= 2 * 2**16
    assert allocated_bytes(lambda: x.add_(1)) < 1024


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_nothing_is_allocated_after_the_first_call(name: str, rounding: str) -> None:
    has_rounding = "rounding" in FORMATS[name].__dataclass_fields__  # type: ignore[attr-defined]
    wire = FORMATS[name](**({"rounding": rounding} if has_rounding else {}))  # type: ignore[call-arg]
    numel = 2**18 + 321
    x, residual, out = torch.randn(3, numel).unbind()
    data = torch.empty(wire.num_bytes(numel), dtype=torch.uint8)
    codec = wire.codec(numel, CPU, "eager")

    def everything() -> None:
        codec.encode(x, data, seed=1)
        codec.decode(data, out)
        codec.decode_add(data, out)
        codec.encode_with_feedback(x, residual, data)

    everything()
    assert allocated_bytes(everything) < 16 * 1024


@needs_compiler
def test_compiled_kernels_allocate_nothing_large() -> None:
    """What the compiler keeps between its loops is per group, not per element."""
    wire = Int4()
    x, residual = torch.randn(2, group_codec.SLICE).unbind()
    data = torch.empty(wire.num_bytes(len(x)), dtype=torch.uint8)
    codec = wire.codec(len(x), CPU, "compiled")
    codec.encode_with_feedback(x, residual, data)
    assert allocated_bytes(lambda: codec.encode_with_feedback(x, residual, data)) < 2**18


@pytest.mark.ci
def test_a_missing_compiler_is_noticed(tmp_path: Path) -> None:
    code = "from dsx.compress.wire.compiled import unavailable; print(unavailable('cpu'))"
    environment = {**os.environ, "CXX": "/nonexistent/g++", "PATH": "/nonexistent"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() != "None"
