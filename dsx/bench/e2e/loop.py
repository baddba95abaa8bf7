"""What every worker of a run does, whichever library trains: the same batches, timed steps, turns.

Before the first step, and again after the last transfer, a worker waits for a file from whoever
started it and throttles the line in between: set-up and validation would take hours on it.

A machine's own speed drifts within seconds. So a run's steps come in blocks of a few rounds, and
before and after each block the worker takes steps without communication: the ceiling next to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsx.bench.e2e.job import Job
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


@dataclass
class Recorded:
    """What `train` has measured: the sums so far after each step, pauses left out, and ceilings.

    `ceilings` are seconds of steps without communication, one list before every block of steps and
    one after the last; `bytes_in_pauses` what was sent meanwhile, by heartbeats of others.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    ceilings: list[list[float]] = field(default_factory=list)
    bytes_in_pauses: int = 0


class TimedSteps:
    """Steps on batches of one's own, with all that surrounds a step in a run and takes time."""

    def __init__(
        self,
        job: Job,
        cluster: int,
        take_step: TakeStep,
        counters: Callable[[], dict[str, float]] = dict,
    ) -> None:
        shape = job.shape
        self._batches = ClusterBatches(
            TokenWindows(f"{job.data}/train", shape.sequence_length), shape.batch_size,
            cluster_id=cluster, num_clusters=job.num_clusters, rank=0, world_size=1, seed=job.seed,
        )  # fmt: skip
        self._take_step = take_step
        self._counters = counters
        self._first_byte = read_line().bytes_sent
        self._last_ended = 0.0

    def begin(self) -> None:
        """Start the clock of the next step, which a pause may have stopped."""
        self._last_ended = time.perf_counter()

    def step(self) -> dict[str, float]:
        """Take a step; return its loss, its seconds, and what has been sent so far."""
        loss = self._take_step(next(self._batches))
        now = time.perf_counter()
        seconds, self._last_ended = now - self._last_ended, now
        wire_bytes = read_line().bytes_sent - self._first_byte
        return {"seconds": seconds, "loss": loss, "wire_bytes": wire_bytes, **self._counters()}


def train(
    job: Job, trained: TimedSteps, ceiling: TimedSteps | None, settle: Callable[[], None]
) -> Recorded:
    """Take the job's steps; between blocks of them, once nothing is sent, those of the ceiling."""
    recorded = Recorded()
    seconds = 0.0
    for number in range(job.steps):
        if number % job.steps_per_block == 0:
            _pause(job, recorded, ceiling, settle)
            trained.begin()
        step = trained.step()
        seconds += step["seconds"]
        recorded.steps.append({**step, "seconds": seconds})
    _pause(job, recorded, ceiling, settle)
    return recorded


def _pause(
    job: Job, recorded: Recorded, ceiling: TimedSteps | None, settle: Callable[[], None]
) -> None:
    if ceiling is None:
        return
    settle()
    first = read_line().bytes_sent
    ceiling.begin()
    for _ in range(_WARM_UP_STEPS):
        ceiling.step()
    seconds: list[float] = []
    while sum(seconds) < job.ceiling_seconds:
        seconds.append(ceiling.step()["seconds"])
    recorded.ceilings.append(seconds)
    recorded.bytes_in_pauses += read_line().bytes_sent - first


@torch.no_grad()
def validation_loss(model: nn.Module, job: Job) -> float:
    """Return the loss on windows spread over what is held out."""
    held_out = TokenWindows(f"{job.data}/validation", job.shape.sequence_length)
    count = job.validation_windows
    windows = torch.stack([held_out[i * len(held_out) // count] for i in range(count)])
    model.eval()
    return model(windows[:, :-1], windows[:, 1:]).item()


def read_line() -> Traffic:
    """Return what has passed this cluster's interface, by the kernel."""
    return read_traffic(Path("/proc/net/dev").read_text())
