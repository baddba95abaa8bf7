"""How fast, how small and how exact the wire formats are on this machine.

A speed is bytes of fp32 per second: 4 * numel / seconds, whatever the message's size. It is the
wall time of one thread in the best of several passes; each pass times a copy of the vector
(`memcpy`, its bytes counted once) and then every operation, so that the load of other processes
falls on all alike. On a GPU the times are those of CUDA events.

`reduce` is what the owner of a part does with 4 peers' messages: decode, add three more, divide,
encode as int8; slice by slice, and per element of the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dsx.compress.wire.base import Codec, Kernels, Wire
from dsx.compress.wire.compiled import unavailable
from dsx.compress.wire.formats import FORMATS, GROUP_SIZES, Int8
from dsx.compress.wire.kernel_choice import is_native
from dsx.core.checks import require_choice
from dsx.core.progress import SOON, Progress, as_count

logger = logging.getLogger(__name__)

NUM_PEERS = 4
CHUNK = 2**20
OPERATIONS = ("encode", "decode", "encode_ef", "reduce")


@dataclass(frozen=True)
class BenchOptions:
    """What is measured: formats with their options, the vector's length, the kernels."""

    wires: tuple[Wire, ...]
    numel: int
    kernels: Kernels
    repeats: int

    @classmethod
    def parse(
        cls,
        formats: str | None,
        numel: int,
        kernels: str,
        group_size: int | None,
        repeats: int,
    ) -> BenchOptions:
        """Read the command line's values; ValueError for an unknown or an ignored one."""
        names = list(FORMATS) if formats is None else [name.strip() for name in formats.split(",")]
        for name in names:
            if name not in FORMATS:
                raise ValueError(f"format {name!r} is not known; allowed: {', '.join(FORMATS)}")
        require_choice("kernels", kernels, Kernels)
        wires = [_make_wire(name, group_size) for name in names]
        if group_size is not None and not any(hasattr(wire, "group_size") for wire in wires):
            raise ValueError(
                f"group_size={group_size} has no effect on {', '.join(names)}; leave it out"
            )
        return cls(tuple(wires), numel, cast(Kernels, kernels), repeats)


@dataclass(frozen=True)
class CodecFigures:
    """One format on one device; speeds in 10^9 bytes of fp32 per second, NMSE as a fraction."""

    format: str
    device: str
    kernels: str
    bytes_per_element: float
    nmse_gaussian: float
    nmse_pseudo_gradients: float | None
    memcpy: float
    speeds: dict[str, float]

    def percent(self, operation: str) -> float:
        """Speed of `operation` as a percentage of the copy's."""
        return 100 * self.speeds[operation] / self.memcpy

    def as_json(self) -> dict[str, Any]:
        """Return the flat object that `--json` writes."""
        values = asdict(self)
        del values["speeds"], values["memcpy"]
        if self.nmse_pseudo_gradients is None:
            del values["nmse_pseudo_gradients"]
        for operation, speed in self.speeds.items():
            values[f"{operation}_percent_memcpy"] = round(self.percent(operation), 2)
            values[f"{operation}_gb_per_second"] = round(speed, 4)
        values["memcpy_gb_per_second"] = round(self.memcpy, 4)
        return values


def measure_codecs(
    options: BenchOptions,
    pseudo_gradients: Path | None = None,
    on: Sequence[str] | None = None,
) -> list[CodecFigures]:
    """Measure every format `on` the CPU and, where there is one, on the GPU.

    Raises ValueError for a file without tensors, RuntimeError if compiled kernels were asked for
    and cannot be had. Uses one thread while it runs.
    """
    real = None if pseudo_gradients is None else load_flat(pseudo_gradients)
    names = on or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    devices: list[tuple[torch.device, Kernels]] = [
        (torch.device(name), _kernels(options.kernels, name)) for name in names
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return list(_measured(options, devices, real))
    finally:
        torch.set_num_threads(threads)


def _measured(
    options: BenchOptions, devices: list[tuple[torch.device, Kernels]], real: Tensor | None
) -> Iterator[CodecFigures]:
    asked = [(wire, *on) for on in devices for wire in options.wires]
    progress = Progress("formats", len(asked), True, first_seconds=SOON, shown=as_count)
    for wire, device, kernels in asked:
        yield _measure(wire, options, device, kernels, real)
        progress.moved(1)


def load_flat(path: Path) -> Tensor:
    """Return all tensors of a safetensors file, flattened and concatenated, as fp32."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file: {error}; make one by dsx bench pseudo-gradients"
        ) from error
    if not any(tensor.numel() for tensor in tensors.values()):
        raise ValueError(f"{path} holds no values; save a model's pseudo-gradients to it")
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])


def nmse(wire: Wire, x: Tensor) -> float:
    """Return `|x - decoded|^2 / |x|^2` of one message; 0 for a vector of zeros."""
    data = torch.empty(wire.num_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    codec = wire.codec(x.numel(), x.device, "eager")
    codec.encode(x, data)
    codec.decode(data, decoded)
    energy = float(x.double().square().sum())
    return float((x.double() - decoded.double()).square().sum()) / energy if energy else 0.0


def print_table(figures: list[CodecFigures]) -> None:
    """Print the figures for people: GB/s and percent of the copy."""
    from rich.console import Console
    from rich.table import Table

    has_real = any(figure.nmse_pseudo_gradients is not None for figure in figures)
    titles = ["encode", "decode", "encode+EF", f"reduce {NUM_PEERS}", "memcpy", "bytes", "NMSE"]
    table = Table(
        caption="GB/s of fp32 and % of memcpy, one thread, best pass; "
        "bytes per element; NMSE of a Gaussian"
    )
    table.add_column("format", no_wrap=True)
    table.add_column("kernels", no_wrap=True)
    for title in [*titles, *(["of file"] if has_real else [])]:
        table.add_column(title, justify="right", no_wrap=True)
    for figure in figures:
        errors = [figure.nmse_gaussian, figure.nmse_pseudo_gradients]
        table.add_row(
            figure.format if figure.device == "cpu" else f"{figure.format} {figure.device}",
            figure.kernels,
            *(f"{figure.speeds[op]:.1f} {figure.percent(op):3.0f}%" for op in OPERATIONS),
            f"{figure.memcpy:.1f}",
            f"{figure.bytes_per_element:.4f}",
            *(f"{error:.2g}" for error in errors if error is not None),
        )
    console = Console(highlight=False)
    console.width = max(console.width, 112)
    console.print(table)


def _make_wire(name: str, group_size: int | None) -> Wire:
    is_grouped = hasattr(FORMATS[name], "group_size")
    if group_size is not None and group_size not in GROUP_SIZES:
        allowed = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"group_size={group_size} must be one of {allowed}")
    options: dict[str, Any] = {"group_size": group_size} if is_grouped and group_size else {}
    return FORMATS[name](**options)


def _measure(
    wire: Wire,
    options: BenchOptions,
    device: torch.device,
    kernels: Kernels,
    real: Tensor | None,
) -> CodecFigures:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(options.numel, generator=generator, device=device)
    gaussian = nmse(wire, x)
    codec = wire.codec(options.numel, device, kernels)
    calls = _operations(wire, codec, x, kernels)
    seconds = best_seconds(calls, options.repeats, device)
    speeds = {name: 4e-9 * options.numel / value for name, value in seconds.items()}
    return CodecFigures(
        format=wire.name,
        device=device.type,
        kernels=codec.kernels,
        bytes_per_element=wire.num_bytes(options.numel) / options.numel,
        nmse_gaussian=gaussian,
        nmse_pseudo_gradients=None if real is None else nmse(wire, real.to(device)),
        memcpy=speeds.pop("memcpy"),
        speeds=speeds,
    )


def _kernels(kernels: Kernels, device: str) -> Kernels:
    """Resolve "auto": without native kernels vectors of any length are compiled, where possible."""
    if kernels != "auto":
        return kernels
    if device == "cpu" and is_native(kernels):
        return "native"
    problem = unavailable(device)
    if problem is None:
        return "compiled"
    logger.warning("measuring eager kernels: no compiler works on %s: %s", device, problem)
    return "eager"


def _operations(
    wire: Wire, codec: Codec, x: Tensor, kernels: Kernels
) -> dict[str, Callable[[], object]]:
    """Return what is timed, every call made once so that compiling is over."""
    data = torch.empty(wire.num_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    out, fed, residual = torch.zeros_like(x), x.clone(), torch.zeros_like(x)
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: out.copy_(x),
        "encode": lambda: codec.encode(x, data),
        "decode": lambda: codec.decode(data, out),
        "encode_ef": lambda: codec.encode_with_feedback(fed, residual, data),
        "reduce": _reduction(wire, x, kernels),
    }
    for call in calls.values():
        call()
    return calls


def _reduction(wire: Wire, x: Tensor, kernels: Kernels) -> Callable[[], None]:
    """Return the mean of `NUM_PEERS` messages as int8, in chunks that stay in a cache."""
    chunk = min(CHUNK // wire.granularity * wire.granularity, x.numel())
    starts = range(0, x.numel() - chunk + 1, chunk)
    target = Int8()
    reader = wire.codec(chunk, x.device, kernels)
    writer = target.codec(chunk, x.device, kernels)
    shape = (len(starts), NUM_PEERS, wire.num_bytes(chunk))
    messages = torch.empty(shape, dtype=torch.uint8, device=x.device)
    result = torch.empty((len(starts), target.num_bytes(chunk)), dtype=torch.uint8, device=x.device)
    mean = torch.empty(chunk, device=x.device)
    for start, peers in zip(starts, messages, strict=True):
        for message in peers:
            reader.encode(x[start : start + chunk], message)

    def reduce() -> None:
        for peers, out in zip(messages, result, strict=True):
            reader.decode(peers[0], mean)
            for message in peers[1:]:
                reader.decode_add(message, mean)
            writer.encode(mean.mul_(1 / NUM_PEERS), out)

    return reduce


def best_seconds(
    calls: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Return the least time of each call, over passes that time all of them in turn.

    Every call was made once before, so that what it allocates is there.
    """
    timed = _cuda_seconds if device.type == "cuda" else _wall_seconds
    passes = [{name: timed(call) for name, call in calls.items()} for _ in range(repeats)]
    return {name: min(one[name] for one in passes) for name in calls}


def _wall_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cuda_seconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
