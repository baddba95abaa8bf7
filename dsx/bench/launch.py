"""What a launch and an apply cost the training thread: `dsx bench overhead`.

A fragment is launched as in a run, with one cluster, so that the transfer's own thread has only
the copy to wait for. Next to it, in the same passes, what no launch can go without: forming the
pseudo-gradient of masters and anchor, on the host where transfers start. The rest is what dsx
adds. On an accelerator the copy runs beside the compute stream, and only what it takes to start
it is the training thread's. An apply is the outer step and the masters that it writes, without the
wait for the transfer. On the host all of it is processor time: what else runs there is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dsx.comm.gloo import GlooTransport
from dsx.config.schema import preset
from dsx.core.membership import Seat
from dsx.core.progress import SOON, Progress, as_count
from dsx.engines.torch import TorchAdapter
from dsx.method.in_one_pass import difference_
from dsx.outer.loop import OuterLoop
from dsx.plan.launch_cost import LaunchCost, read_launch_figures

_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class LaunchFigures:
    """Median milliseconds of the training thread, per launch and apply of `numel` elements."""

    numel: int
    device: str
    compression: str
    launch_ms: float
    copy_ms: float
    added_ms: float
    apply_ms: float


def measure_launches(
    sizes: Sequence[int], device: str, codecs: Sequence[dict[str, Any]], repeats: int
) -> list[LaunchFigures]:
    """Return what launches of fragments of some sizes cost, with each codec."""
    asked = [(numel, codec) for numel in sizes for codec in codecs]
    progress = Progress("launches", len(asked) * (repeats + 1), True, first_seconds=SOON,
                        shown=as_count)  # fmt: skip
    return [measure_launch(n, device, codec, repeats, progress) for n, codec in asked]


def measure_launch(
    numel: int, device: str, codec: dict[str, Any], repeats: int, progress: Progress | None = None
) -> LaunchFigures:
    """Return what launches of one fragment cost; each is told to `progress`."""
    model = nn.ParameterDict({"w": torch.zeros(numel, device=device)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changed: dict[str, Any] = {
        "schedule": {"interval": 2},
        "delay": {"steps": 1},
        "fragments": {"by": "model"},
        "compression": codec,
    }
    method = preset("streaming_diloco", 1, **changed)
    adapter = TorchAdapter(model, optimizer, method.fragments, 1)
    transport = GlooTransport([0], lambda what, n: [], Seat.of(0, 1), _DEADLINE_SECONDS)
    loop = OuterLoop(method, adapter, transport)
    loop.start()
    buffers, local = loop.state.take_buffers(0, 0), torch.empty(numel, device=device)
    buffers.is_free, sent = True, buffers.sent
    anchor = loop.state.anchor[0]

    def copies() -> None:
        live = adapter.in_a_row(0, 0, numel)
        assert live is not None
        difference_(anchor, live, local if live.is_cuda else sent)

    passes: list[tuple[float, float]] = []
    applies: list[float] = []
    for _ in range(repeats + 1):  # the first one allocates
        loop.launch_due()  # of a step between launches, at whose end the last one is applied
        waited, syncs = loop.totals.wait_seconds, loop.totals.syncs
        applied = _seconds(loop.apply_ripe, local)
        if loop.totals.syncs > syncs:
            waited = loop.totals.wait_seconds - waited if local.is_cuda else 0.0
            applies.append(applied - waited)
        copied = _seconds(copies, local)
        launched = _seconds(loop.launch_due, local)
        loop.apply_ripe()
        passes.append((launched, copied))
        if progress is not None:
            progress.moved(1)
    transport.close()
    launch, copy = (1000 * median(p[i] for p in passes[1:]) for i in range(2))
    added, apply = 1000 * median(a - b for a, b in passes[1:]), 1000 * median(applies)
    return LaunchFigures(numel, device, str(codec["type"]), launch, copy, added, apply)


def _seconds(call: Callable[[], object], at: Tensor) -> float:
    clock = time.perf_counter if at.is_cuda else time.thread_time
    if at.is_cuda:
        torch.cuda.synchronize(at.device)
    started = clock()
    call()
    return clock() - started


def print_launch(figures: list[LaunchFigures]) -> None:
    """Print a table, one row per size and codec."""
    table = Table(caption="ms of the training thread per launch and apply, median")
    for title in ("elements", "device", "compression", "launch", "copies alone", "added", "apply"):
        table.add_column(title, justify="left" if title in ("device", "compression") else "right")
    for figure in figures:
        values = (figure.launch_ms, figure.copy_ms, figure.added_ms, figure.apply_ms)
        table.add_row(
            f"{figure.numel:,}", figure.device, figure.compression, *(f"{v:.2f}" for v in values)
        )
    Console(highlight=False).print(table)


def cost_of(figures: list[LaunchFigures], command: str, host: str) -> LaunchCost:
    """Return what plans are made with, of the largest size; `command` has measured it on `host`."""
    return LaunchCost(read_launch_figures(as_json(figures)), command, host)


def as_json(figures: list[LaunchFigures]) -> list[dict[str, Any]]:
    """Return the figures as JSON values."""
    return [asdict(figure) for figure in figures]
