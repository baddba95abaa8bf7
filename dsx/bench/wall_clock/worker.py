"""One rank of `dsx bench wall-clock`: trains as its job says, and writes down every step.

    deepspeed --num_gpus 1 --module dsx.bench.wall_clock.worker --job job.json --cluster 0

Weights go to files, to be averaged and scored when the run is over: nothing but training passes
the line. Only the finished model of a preset is averaged on the line, as in any run, and that is in
its seconds and its bytes. Writing the files of a run's points takes time in every run alike. It
stays in the run's seconds, as transfers go on meanwhile, and `snapshot_seconds` tell it. Beside the
time of a step stand that of its forward, which has no communication in any run, and the CPU seconds
of the training thread: both tell of a machine that others disturb.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo
import torch.distributed as dist
from safetensors.torch import save_file

import dsx
from dsx.bench.e2e.loop import TimedSteps, Turns, read_line
from dsx.bench.e2e.worker import Counters, parse_arguments
from dsx.bench.wall_clock.inner import TimedInner
from dsx.bench.wall_clock.job import TrainingJob
from dsx.engines.deepspeed.engine import adopt_world
from dsx.outer.recovery import NonFiniteError
from dsx.training.handle import Handle

_TELL_SECONDS = 2.0


def start(job: TrainingJob, arguments: argparse.Namespace) -> tuple[TimedInner, Handle | None]:
    """Return who takes inner steps: alone, in one world over all clusters, or with a preset."""
    if job.mode == "dsx":
        dsx.init_distributed(job.config, arguments)
        inner = TimedInner(job, dsx.initialize)
        return inner, inner.engine.dsx
    dist.init_process_group("gloo")  # the launcher's world, over all clusters or of this one
    adopt_world()
    return TimedInner(job, deepspeed.initialize), None


class Training:
    """A run on the line, from the first step to the finished model."""

    def __init__(
        self, job: TrainingJob, cluster: int, inner: TimedInner, handle: Handle | None
    ) -> None:
        self._job, self._cluster = job, cluster
        self._inner, self._handle = inner, handle
        self._counters = Counters(handle).read if handle is not None else dict[str, float]
        self._trained = TimedSteps(
            job, cluster, inner.take_step, lambda: {**inner.read(), **self._counters()}
        )
        self._first_byte = read_line().bytes_sent
        self._began, self._told = time.perf_counter(), 0.0
        self._snapshot_seconds = 0.0
        self.steps: list[dict[str, float]] = []

    def run(self) -> dict[str, Any]:
        """Train; return what is written beside the weights.

        A model that is not finite ends a run of dsx by an error, which is a result here.
        """
        try:
            ended, has_diverged = self._train(), False
        except NonFiniteError:
            ended, has_diverged = self._end(), True
        return {
            "steps": self.steps, "end": ended, "has_diverged": has_diverged,
            "snapshot_seconds": self._snapshot_seconds,
        }  # fmt: skip

    def _train(self) -> dict[str, float]:
        self._trained.begin()
        while len(self.steps) < self._job.steps and not self._is_late():
            self._step()
        if self._handle is not None:
            self._handle.finish()
        with self._handle.averaged() if self._handle is not None else nullcontext():
            ended = self._end()
            self._save("end")
        return ended

    def _end(self) -> dict[str, float]:
        return {**self._now(), **self._counters()}

    def _now(self) -> dict[str, float]:
        sent = read_line().bytes_sent - self._first_byte
        return {"seconds": time.perf_counter() - self._began, "wire_bytes": sent}

    def _step(self) -> None:
        step = {**self._trained.step(), **self._now()}
        self.steps.append(step)
        number = len(self.steps)
        if number in self._job.snapshot_steps:
            began = time.perf_counter()
            self._save(str(number))
            self._snapshot_seconds += time.perf_counter() - began
        if step["seconds"] - self._told > _TELL_SECONDS:
            self._told = step["seconds"]
            told = Path(self._job.directory) / f"progress_{self._cluster}"
            told.with_suffix(".tmp").write_text(json.dumps({**step, "step": number}))
            told.with_suffix(".tmp").rename(told.with_suffix(".json"))

    def _is_late(self) -> bool:
        """Return whether any cluster's time is up: all end behind the same step."""
        if self._job.most_seconds is None:
            return False
        late = torch.tensor([self._now()["seconds"] > self._job.most_seconds], dtype=torch.int32)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        return bool(late)

    def _save(self, name: str) -> None:
        if self._job.mode == "dsx" or self._cluster == 0:  # else all have the same
            weights = {k: v.contiguous() for k, v in self._inner.engine.module.state_dict().items()}
            save_file(weights, Path(self._job.directory) / f"weights_{name}_{self._cluster}")


def run(job: TrainingJob, arguments: argparse.Namespace) -> None:
    """Train when the line is ready, and write `cluster_<m>.json`."""
    turns = Turns(job, arguments.cluster)
    inner, handle = start(job, arguments)
    turns.begin()
    record = Training(job, arguments.cluster, inner, handle).run()
    turns.end()
    turns.write(record)
    if handle is not None:
        handle.close()


def main() -> None:
    """Run the job that the command line names."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # compiling, of Muon's step and of codes, would be timed
    run(TrainingJob.read(arguments.job), arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
