"""Starts the ranks of a check's clusters, several checks at a time, each with a deadline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsx.bench.e2e.run import RunFailed
from dsx.bench.free_ports import free_low_ports
from dsx.bench.gpu.job import NUM_CLUSTERS, Job

_TAIL = 400
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|PeerLost)\b")
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Machine:
    """Where ranks run: `gpus` of CUDA, or with 0 the CPU; clusters share a single one."""

    gpus: int
    deadline_seconds: float = 180.0

    @property
    def ranks_per_cluster(self) -> int:
        """Return how many ranks a cluster has: a GPU for each, but for clusters that share one."""
        return max(1, self.gpus // NUM_CLUSTERS)

    def visible(self, cluster: int) -> str:
        """Return what a cluster's ranks see of the GPUs."""
        count = self.ranks_per_cluster
        first = 0 if self.gpus < NUM_CLUSTERS else cluster * count
        return ",".join(map(str, range(first, first + count))) if self.gpus else ""


def run(
    job: Job,
    machine: Machine,
    folder: Path,
    module: str = "worker",
    ranks: int | None = None,
    threads: int = 1,
) -> list[list[dict[str, Any]]]:
    """Run a job in its clusters; return what each rank has written, by cluster and rank.

    RunFailed, with the end of what it has printed, for a rank that has not done its part.
    """
    folder.mkdir(parents=True)
    count = machine.ranks_per_cluster if ranks is None else ranks
    meeting, *masters = free_low_ports(1 + job.num_clusters)
    jobs = [
        replace(job, cluster=m, meeting=f"tcp://127.0.0.1:{meeting}", folder=str(folder))
        for m in range(job.num_clusters)
    ]
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for own, port in zip(jobs, masters, strict=True):
            own.write()
            for rank in range(count):
                log = folder / f"rank_{own.cluster}_{rank}.log"
                started.append((_start(own, module, rank, count, port, machine, log, threads), log))
        _wait(started, machine.deadline_seconds)
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
    return [
        [json.loads(own.result_path(rank).read_text()) for rank in range(count)] for own in jobs
    ]


def _start(
    job: Job,
    module: str,
    rank: int,
    count: int,
    port: int,
    machine: Machine,
    log: Path,
    threads: int,
) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": machine.visible(job.cluster), "OMP_NUM_THREADS": str(threads),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }  # fmt: skip
    if not machine.gpus:
        own["DS_ACCELERATOR"] = "cpu"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSX_")}
    command = [sys.executable, "-m", f"dsx.bench.gpu.{module}", str(job.path())]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**kept, **own}, cwd=job.folder
        )


def _wait(started: Sequence[tuple[subprocess.Popen[bytes], Path]], seconds: float) -> None:
    until = time.monotonic() + seconds
    waiting = list(started)
    while waiting:
        for process, log in list(waiting):
            if (status := process.poll()) is not None:
                waiting.remove((process, log))
                if status:
                    raise RunFailed(f"{log.stem} has ended with {status}: {_tail(log)}")
        if time.monotonic() > until:
            process, log = waiting[0]
            raise RunFailed(f"{log.stem} has not ended within {seconds:g} s: {_tail(log)}")
        time.sleep(_POLL_SECONDS)


def _tail(log: Path) -> str:
    """Return the last error that was told, or the last that was said."""
    text = log.read_text(errors="replace")
    errors = [line for line in text.splitlines() if _ERROR.match(line)]
    return (errors[-1] if errors else text[-_TAIL:]).strip()[:_TAIL]


def in_turns(calls: Sequence[Callable[[], list[Any]]], at_once: int) -> Iterator[list[Any]]:
    """Yield what calls return, as they end, so many running at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        for done in as_completed([pool.submit(call) for call in calls]):
            yield done.result()
