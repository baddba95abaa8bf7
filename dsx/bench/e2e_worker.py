"""One rank of `dsx bench e2e`: trains a small GPT as its job says and writes down every step.

    deepspeed --num_gpus 1 --module dsx.bench.e2e_worker --job job.json --cluster 0

The same model, batches and inner optimizer whatever the clusters do: nothing (`ceiling`),
DeepSpeed's own all-reduce in every step (`data_parallel`), or a preset (`dsx`). In the run of a
preset an engine of DeepSpeed alone, in the same process, measures the ceiling between rounds.
"""

from __future__ import annotations

import argparse
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
from dsx.bench.e2e_loop import Turns, Walk, read_line, train, validation_windows
from dsx.transfer import Transfer


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


def start_alone(job: Job) -> Any:
    """Return an engine of DeepSpeed alone, without communication."""
    plain = {key: value for key, value in job.config.items() if key != "dsx"}
    model: Any = build_model(job.shape, job.seed)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)[0]


def take_step(engine: Any, windows: Tensor) -> float:
    """Take one inner step; return its loss."""
    loss = engine(windows[:, :-1], windows[:, 1:])
    engine.backward(loss)
    engine.step()
    return loss.item()


def settle(engine: Any) -> None:
    """Wait for all that is under way; it is applied when its time has come, as otherwise."""
    for transfer in engine.dsx.loop.in_flight:
        if isinstance(transfer, Transfer):
            transfer.pending.wait()


def run(job: Job, arguments: argparse.Namespace) -> None:
    """Train, and write `cluster_<m>.json`: per step and cumulative, and the validation loss."""
    cluster = arguments.cluster
    is_dsx = job.mode == "dsx"
    engine, turns = start_engine(job, arguments), Turns(job, cluster)
    count = (lambda: counters(engine)) if is_dsx else dict
    walk = Walk(job, cluster, lambda windows: take_step(engine, windows), count)
    alone = None
    if is_dsx:
        apart = start_alone(job)
        alone = Walk(job, cluster, lambda windows: take_step(apart, windows))
    turns.begin()
    began, first = time.perf_counter(), read_line()
    course = train(job, walk, alone, lambda: settle(engine))
    if is_dsx:
        engine.dsx.loop.drain()
    payload_bytes = engine.dsx.totals.bytes_sent if is_dsx else 0
    if is_dsx:
        engine.dsx.finish()  # which compares what was applied, beside the payload
    drained_seconds = time.perf_counter() - began
    wire_bytes = read_line().bytes_sent - first.bytes_sent
    turns.end()
    turns.write(
        {
            "steps": course.steps,
            "ceilings": course.ceilings,
            "drained_seconds": drained_seconds,
            "wire_bytes": wire_bytes,
            "bytes_sent": payload_bytes,
            "syncs": engine.dsx.totals.syncs if is_dsx else 0,
            "wait_seconds": engine.dsx.totals.wait_seconds if is_dsx else 0.0,
            "blocked_seconds": engine.dsx.totals.blocked_seconds if is_dsx else 0.0,
            "validation_loss": validate(engine, job),
        }
    )
    if is_dsx:
        engine.dsx.close()


def counters(engine: Any) -> dict[str, float]:
    """Return what dsx has counted so far."""
    totals = engine.dsx.totals
    return {"wait_seconds": totals.wait_seconds, "bytes_sent": totals.bytes_sent}


@torch.no_grad()
def validate(engine: Any, job: Job) -> float:
    """Return the loss of the finished model: of the clusters' average where dsx makes one."""
    windows = validation_windows(job)
    engine.eval()
    if job.mode != "dsx":
        return engine.module(windows[:, :-1], windows[:, 1:]).item()
    with engine.dsx.averaged():
        return engine.module(windows[:, :-1], windows[:, 1:]).item()


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
