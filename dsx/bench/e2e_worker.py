"""One rank of `dsx bench e2e`: trains a small GPT as its job says and writes down every step.

    deepspeed --num_gpus 1 --module dsx.bench.e2e_worker --job job.json --cluster 0

The same model, batches and inner optimizer whatever the clusters do: nothing (`ceiling`),
DeepSpeed's own all-reduce in every step (`data_parallel`), or a preset (`dsx`). The ceiling is
also measured in every run of a preset, by an engine of DeepSpeed alone on the same core right
before the first step and right after the last transfer: machines drift within minutes.

Before the first step, and again after the last transfer, it waits for a file from whoever started
it and throttles the line in between: set-up and validation would take hours on it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.backends.deepspeed import adopt_world
from dsx.bench.e2e_job import Job, build_model
from dsx.bench.testbed import Traffic, read_traffic
from dsx.data import ClusterBatches, TokenWindows

WARM_UP_STEPS = 5
_POLL_SECONDS = 0.02


def start_engine(job: Job, arguments: argparse.Namespace) -> Any:
    """Return the engine: DeepSpeed alone, or with the outer training of the config."""
    if job.mode == "dsx":
        dsx.init_distributed(job.config, arguments)
    else:
        dist.init_process_group("gloo")  # the launcher's world, over all clusters or of this one
        adopt_world()
    initialize: Any = dsx.initialize if job.mode == "dsx" else deepspeed.initialize
    model = build_model(job.shape, job.seed)
    return initialize(model=model, model_parameters=model.parameters(), config=job.config)[0]


class Ceiling:
    """An engine of its own without communication, which trains on one batch."""

    def __init__(self, job: Job) -> None:
        plain = {key: value for key, value in job.config.items() if key != "dsx"}
        model: Any = build_model(job.shape, job.seed)
        self._engine: Any = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=plain
        )[0]
        self._steps = job.ceiling_steps
        size = (job.shape.batch_size, job.shape.sequence_length + 1)
        self._windows = torch.randint(job.shape.vocab_size, size)

    def measure(self) -> list[float]:
        """Return the seconds of each of some steps, after a few that warm up."""
        seconds: list[float] = []
        for _ in range(WARM_UP_STEPS + self._steps):
            began = time.perf_counter()
            take_step(self._engine, self._windows)
            seconds.append(time.perf_counter() - began)
        return seconds[WARM_UP_STEPS:]


def take_step(engine: Any, windows: Tensor) -> float:
    """Take one inner step; return its loss."""
    loss = engine(windows[:, :-1], windows[:, 1:])
    engine.backward(loss)
    engine.step()
    return loss.item()


def wait_for(path: Path, deadline_seconds: float) -> None:
    """Wait until the orchestrator has made a file; TimeoutError names it."""
    until = time.monotonic() + deadline_seconds
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} did not come within {deadline_seconds:g} s")
        time.sleep(_POLL_SECONDS)


def run(job: Job, arguments: argparse.Namespace) -> None:
    """Train, and write `cluster_<m>.json`: per step and cumulative, and the validation loss."""
    cluster, directory = arguments.cluster, Path(job.directory)
    is_dsx = job.mode == "dsx"
    engine = start_engine(job, arguments)
    ceiling = Ceiling(job) if is_dsx else None
    (directory / f"ready_{cluster}").touch()
    wait_for(directory / "go", job.deadline_seconds)
    before = ceiling.measure() if ceiling else []
    began, first = time.perf_counter(), read_line()
    steps = train(engine, job, cluster)
    if is_dsx:
        engine.dsx.loop.drain()
    payload_bytes = engine.dsx.totals.bytes_sent if is_dsx else 0
    if is_dsx:
        engine.dsx.finish()  # which compares what was applied, beside the payload
    drained_seconds = time.perf_counter() - began
    wire_bytes = read_line().bytes_sent - first.bytes_sent
    after = ceiling.measure() if ceiling else []
    (directory / f"drained_{cluster}").touch()
    wait_for(directory / "leave", job.deadline_seconds)
    record = {
        "steps": steps,
        "ceiling_before": before,
        "ceiling_after": after,
        "drained_seconds": drained_seconds,
        "wire_bytes": wire_bytes,
        "bytes_sent": payload_bytes,
        "syncs": engine.dsx.totals.syncs if is_dsx else 0,
        "wait_seconds": engine.dsx.totals.wait_seconds if is_dsx else 0.0,
        "blocked_seconds": engine.dsx.totals.blocked_seconds if is_dsx else 0.0,
        "validation_loss": validate(engine, job),
    }
    written = directory / f"cluster_{cluster}.tmp"
    written.write_text(json.dumps(record) + "\n")
    written.rename(directory / f"cluster_{cluster}.json")
    if is_dsx:
        engine.dsx.close()


def train(engine: Any, job: Job, cluster: int) -> list[dict[str, float]]:
    """Take the job's steps; return, after each, its loss and the sums so far."""
    shape = job.shape
    batches = ClusterBatches(
        TokenWindows(f"{job.data}/train", shape.sequence_length), shape.batch_size,
        cluster_id=cluster, num_clusters=job.num_clusters, rank=0, world_size=1, seed=job.seed,
    )  # fmt: skip
    steps: list[dict[str, float]] = []
    began, first = time.perf_counter(), read_line().bytes_sent
    for _ in range(job.steps):
        loss = take_step(engine, next(batches))
        record = {
            "seconds": time.perf_counter() - began,
            "loss": loss,
            "wire_bytes": read_line().bytes_sent - first,
        }
        if job.mode == "dsx":
            record["wait_seconds"] = engine.dsx.totals.wait_seconds
            record["bytes_sent"] = engine.dsx.totals.bytes_sent
        steps.append(record)
    return steps


@torch.no_grad()
def validate(engine: Any, job: Job) -> float:
    """Return the loss of the finished model: of the clusters' average where dsx makes one."""
    shape = job.shape
    held_out = TokenWindows(f"{job.data}/validation", shape.sequence_length)
    count = job.validation_windows
    windows = torch.stack([held_out[i * len(held_out) // count] for i in range(count)])
    engine.eval()
    if job.mode != "dsx":
        return engine.module(windows[:, :-1], windows[:, 1:]).item()
    with engine.dsx.averaged():
        return engine.module(windows[:, :-1], windows[:, 1:]).item()


def read_line() -> Traffic:
    """Return what has passed this cluster's interface, by the kernel."""
    return read_traffic(Path("/proc/net/dev").read_text())


def main() -> None:
    """Run the job that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--cluster", type=int, required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    dsx.add_config_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run(Job.read(arguments.job), arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
