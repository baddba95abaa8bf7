"""One run of `dsx bench telemetry`: its processes, that all was really told, and what it cost."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dsx.bench.e2e.run import RunFailed
from dsx.bench.free_ports import free_ports
from dsx.bench.telemetry.job import NUM_CLUSTERS, RUN, Block, Job, log_path
from dsx.bench.telemetry.stub import NOTICES, SPANS, Stub
from dsx.bench.worker_files import read_log
from dsx.plan.published.scenario import require_number

NEEDED = {"prometheus_client": "prometheus", "opentelemetry.exporter": "otel"}
OUTLETS = ("wandb", "mlflow", "tensorboard")  # modules, extras, and names in `metrics.to`
_TELL_SECONDS = 10.0
_POLL_SECONDS = 0.2
_TAIL = 3000
CLOCKS = {
    "thread_seconds": "training thread",
    "process_seconds": "all threads",
    "wall_seconds": "wall",
}


@dataclass(frozen=True)
class Options:
    """What is asked; `pairs` of blocks of `steps` inner steps, one with and one without."""

    pairs: int = 20
    steps: int = 10
    layers: int = 8
    width: int = 512
    rows: int = 2048
    interval: int = 16
    outlets: tuple[str, ...] | None = None  # None: those that are installed
    deadline_seconds: float = 1800.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("pairs", 2, 1000), ("steps", 1, 10_000), ("layers", 4, 1000), ("width", 8, 65_536),
            ("rows", 1, 1_000_000), ("interval", 4, 10_000), ("deadline_seconds", 10, 1e6),
        ):  # fmt: skip
            require_number(name, getattr(self, name), least, most)
        if self.interval % 4:
            raise ValueError(f"interval={self.interval} must be a multiple of 4, for 4 fragments")
        if wrong := [name for name in self.outlets or () if name not in OUTLETS]:
            raise ValueError(f"--to has {wrong[0]!r}; it takes none, or of {', '.join(OUTLETS)}")


@dataclass(frozen=True)
class Row:
    """What telling has cost a cluster by one clock: medians over pairs, and half ranges.

    A half range is half of what lies between the least and the most of all pairs. `low` and `high`
    are where the median lies with 95 % confidence, whatever is between the pairs.
    """

    cluster: int
    clock: str
    off_ms: float
    added_ms: float
    low_ms: float
    high_ms: float
    percent: float
    half_range_percent: float
    low_percent: float
    high_percent: float
    pairs: int


@dataclass(frozen=True)
class Report:
    """A row per cluster and clock, what was told where, and each cluster's blocks in order."""

    rows: list[Row]
    told: list[str]
    blocks: list[list[Block]]


def measure(options: Options, say: Callable[[str], None]) -> Report:
    """Run it, and return what that has cost.

    ModuleNotFoundError without what has to be told to; RunFailed where a process ends by an error,
    or where not all has arrived.
    """
    require_installed(options.outlets or ())
    outlets = options.outlets
    if outlets is None:
        outlets = tuple(name for name in OUTLETS if _is_installed(name))
    meeting, *pages = free_ports(1 + NUM_CLUSTERS)
    with tempfile.TemporaryDirectory(prefix="dsx-telemetry-") as folder, Stub(tuple(pages)) as stub:
        job = Job(
            folder, f"tcp://127.0.0.1:{meeting}", stub.address, tuple(pages), outlets,
            options.pairs, options.steps, options.layers, options.width, options.rows,
            options.interval,
        )  # fmt: skip
        job.write()
        _run(job, options.deadline_seconds, say)
        records = [_records(job, cluster) for cluster in range(NUM_CLUSTERS)]
        told = what_was_told(job, stub, records)
    blocks = [[Block(**_block(r)) for r in own if r["what"] == "block"] for own in records]
    rows = [row_of(m, clock, own) for m, own in enumerate(blocks) for clock in CLOCKS]
    return Report(rows, told, blocks)


def require_installed(outlets: Sequence[str]) -> None:
    """Raise ModuleNotFoundError, with the extra, without what a run tells to in any case."""
    for module, extra in {**NEEDED, **{name: name for name in outlets}}.items():
        if not _is_installed(module):
            raise ModuleNotFoundError(
                f'{module} is not installed: pip install "dsx-train[{extra}]"', name=module
            )


def row_of(cluster: int, clock: str, blocks: Sequence[Block]) -> Row:
    """Return what one clock says of pairs of blocks, of which one is on and one is off."""
    pairs = [
        sorted(blocks[at : at + 2], key=lambda block: block.is_on)
        for at in range(0, len(blocks), 2)
    ]
    seconds = [(getattr(off, clock), getattr(on, clock)) for off, on in pairs]
    added = [1000 * (on - off) for off, on in seconds]
    percent = [100 * (on - off) / off for off, on in seconds]
    off_ms = 1000 * median(off for off, _ in seconds)
    return Row(
        cluster, clock, off_ms, median(added), *bounds_of_median(added), median(percent),
        _half_range(percent), *bounds_of_median(percent), len(pairs),
    )  # fmt: skip


def bounds_of_median(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return two of some values between which the median of what they are drawn from lies.

    By how often coins fall: no distribution is assumed. All there is, where that is too little.
    """
    ordered, number = sorted(values), len(values)
    beyond, cut = 0.0, 0
    while cut < number // 2:
        beyond += 2 * math.comb(number, cut) / 2**number
        if beyond > 1 - confidence:
            break
        cut += 1
    place = max(cut - 1, 0)
    return ordered[place], ordered[number - 1 - place]


def what_was_told(job: Job, stub: Stub, records: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Say what has arrived where; RunFailed, by name, for what has not."""
    run = Path(job.directory) / RUN
    steps = [_steps_in(run / name) for name in ("metrics.jsonl", "metrics.cluster_1.jsonl")]
    traces = sorted(run.glob("trace.*"))
    counts: dict[str, int] = {
        "records of steps": min(steps) // job.steps_told,
        "traces of both ranks": len(traces) // NUM_CLUSTERS,
        "posts of spans": stub.received[SPANS],
        "notices": stub.received[NOTICES],
        **{f"looks at page {m}": stub.pages_read[port] for m, port in enumerate(job.pages)},
        **{name: len(list((run / name).glob("*"))) // NUM_CLUSTERS for name in job.outlets},
    }
    lacking = [what for what, count in counts.items() if not count]
    missing = [r["missing"] for own in records for r in own if r["what"] == "end" and r["missing"]]
    if lacking or missing:
        raise RunFailed(f"not all was told, so nothing is measured: {lacking}, missing {missing}")
    return [
        f"{min(steps):,} steps in metrics.jsonl",
        f"traces of {sum(p.stat().st_size for p in traces) / 1e3:,.0f} kB",
        f"{stub.received[SPANS]} posts of spans",
        f"{stub.received[NOTICES]} notices",
        f"{sum(stub.pages_read.values())} looks at pages",
        *job.outlets,
    ]


def _run(job: Job, deadline_seconds: float, say: Callable[[str], None]) -> None:
    folder = Path(job.directory)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    for name in ("MLFLOW_TRACKING_URI", "DSX_METRICS_PROMETHEUS"):
        environment.pop(name, None)
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for cluster in range(NUM_CLUSTERS):
            output = stack.enter_context((folder / f"output_{cluster}").open("wb"))
            words = [sys.executable, "-m", "dsx.bench.telemetry.worker", folder, str(cluster)]
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
            processes.append(process)
            stack.callback(_end, process)
        _await(job, processes, deadline_seconds, say)


def _await(
    job: Job,
    processes: Sequence[subprocess.Popen[bytes]],
    deadline_seconds: float,
    say: Callable[[str], None],
) -> None:
    """Return when all have ended; say every some seconds how far they are."""
    began = told = time.monotonic()
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        now = time.monotonic()
        if now - began > deadline_seconds:
            raise RunFailed(f"the run has not ended within {deadline_seconds:g} s")
        if now - told > _TELL_SECONDS:
            told = now
            done = sum(record["what"] == "block" for record in _records(job, 0))
            say(f"block {done} of {2 * job.num_pairs}")
        time.sleep(_POLL_SECONDS)
    for cluster, process in enumerate(processes):
        if process.poll():
            output = Path(job.directory) / f"output_{cluster}"
            tail = output.read_text(errors="replace")[-_TAIL:].strip()
            raise RunFailed(f"cluster {cluster} has ended with {process.returncode}: {tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _records(job: Job, cluster: int) -> list[dict[str, Any]]:
    return read_log(log_path(Path(job.directory), cluster))


def _block(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("what", "at")}


def _steps_in(path: Path) -> int:
    if not path.exists():
        return 0
    return sum(json.loads(line)["kind"] == "step" for line in path.read_text().splitlines())


def _half_range(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of what it is in
        return False
