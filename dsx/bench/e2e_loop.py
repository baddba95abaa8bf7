"""What every worker of a run does, whichever library trains: the same batches, timed steps, turns.

Before the first step, and again after the last transfer, a worker waits for a file from whoever
started it and throttles the line in between: set-up and validation would take hours on it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.bench.e2e_job import Job
from dsx.bench.testbed import Traffic, read_traffic
from dsx.data import ClusterBatches, TokenWindows

_WARM_UP_STEPS = 5
_POLL_SECONDS = 0.02
TakeStep = Callable[[Tensor], float]  # an inner step on int64 `[batch, length + 1]`; its loss


class Turns:
    """When a worker may begin and end; TimeoutError names the file that did not come."""

    def __init__(self, job: Job, cluster: int) -> None:
        self._directory = Path(job.directory)
        self._cluster = cluster
        self._deadline_seconds = job.deadline_seconds

    def begin(self) -> None:
        """Say that all is set up, and wait until the line is throttled."""
        (self._directory / f"ready_{self._cluster}").touch()
        self._wait_for(self._directory / "go")

    def end(self) -> None:
        """Say that nothing is under way any more, and wait until the line is lifted."""
        (self._directory / f"drained_{self._cluster}").touch()
        self._wait_for(self._directory / "leave")

    def write(self, record: dict[str, Any]) -> None:
        """Write `cluster_<m>.json`, whole or not at all."""
        written = self._directory / f"cluster_{self._cluster}.tmp"
        written.write_text(json.dumps(record) + "\n")
        written.rename(self._directory / f"cluster_{self._cluster}.json")

    def _wait_for(self, path: Path) -> None:
        until = time.monotonic() + self._deadline_seconds
        while not path.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"{path} did not come within {self._deadline_seconds:g} s")
            time.sleep(_POLL_SECONDS)


def train(
    job: Job, cluster: int, take_step: TakeStep, counters: Callable[[], dict[str, float]]
) -> list[dict[str, float]]:
    """Take the job's steps; return, after each, its loss and the sums so far."""
    shape = job.shape
    batches = ClusterBatches(
        TokenWindows(f"{job.data}/train", shape.sequence_length), shape.batch_size,
        cluster_id=cluster, num_clusters=job.num_clusters, rank=0, world_size=1, seed=job.seed,
    )  # fmt: skip
    steps: list[dict[str, float]] = []
    began, first = time.perf_counter(), read_line().bytes_sent
    for _ in range(job.steps):
        loss = take_step(next(batches))
        record = {
            "seconds": time.perf_counter() - began,
            "loss": loss,
            "wire_bytes": read_line().bytes_sent - first,
        }
        steps.append({**record, **counters()})
    return steps


def time_steps(job: Job, take_step: TakeStep) -> list[float]:
    """Return the seconds of each of some steps on one batch, after a few that warm up."""
    size = (job.shape.batch_size, job.shape.sequence_length + 1)
    windows = torch.randint(job.shape.vocab_size, size)
    seconds: list[float] = []
    for _ in range(_WARM_UP_STEPS + job.ceiling_steps):
        began = time.perf_counter()
        take_step(windows)
        seconds.append(time.perf_counter() - began)
    return seconds[_WARM_UP_STEPS:]


def validation_windows(job: Job) -> Tensor:
    """Return windows spread over what is held out, int64 `[windows, length + 1]`."""
    held_out = TokenWindows(f"{job.data}/validation", job.shape.sequence_length)
    count = job.validation_windows
    return torch.stack([held_out[i * len(held_out) // count] for i in range(count)])


def read_line() -> Traffic:
    """Return what has passed this cluster's interface, by the kernel."""
    return read_traffic(Path("/proc/net/dev").read_text())
