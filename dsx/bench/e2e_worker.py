"""One rank of `dsx bench e2e`: trains a small GPT as its job says and writes down every step.

    deepspeed --num_gpus 1 --module dsx.bench.e2e_worker --job job.json --cluster 0

The same model, batches and inner optimizer whatever the clusters do: nothing (`ceiling`),
DeepSpeed's own all-reduce in every step (`data_parallel`), or a preset (`dsx`; `dsx_torch` for one
that is not for DeepSpeed, as it sends from inside the backward). In the run of a preset an engine
without it, in the same process, measures the ceiling between rounds.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import dsx
from dsx.backends.deepspeed import adopt_world
from dsx.bench.e2e_inner import DeepSpeedInner, Inner, PlainInner
from dsx.bench.e2e_job import Job
from dsx.bench.e2e_loop import Turns, Walk, read_line, train, validation_windows
from dsx.handle import Handle
from dsx.transfer import Transfer


def start(job: Job, arguments: argparse.Namespace) -> tuple[Inner, Handle | None]:
    """Return who takes inner steps: alone, or with the outer training of the config."""
    if job.has_dsx:
        dsx.init_distributed(job.config, arguments)
    else:
        dist.init_process_group("gloo")  # the launcher's world, over all clusters or of this one
        adopt_world()
    if job.mode == "dsx":
        trained = DeepSpeedInner(job, job.config, dsx.initialize)
        return trained, trained.engine.dsx
    if job.mode == "dsx_torch":
        plain = PlainInner(job)
        return plain, dsx.attach(plain.model, plain.optimizer, config=job.config)
    return DeepSpeedInner(job, job.config), None


def start_alone(job: Job) -> Inner:
    """Return the same without dsx and any communication."""
    if job.mode == "dsx_torch":
        return PlainInner(job)
    plain = {key: value for key, value in job.config.items() if key != "dsx"}
    return DeepSpeedInner(job, plain)


def settle(handle: Handle) -> None:
    """Wait for all that is under way; it is applied when its time has come, as otherwise."""
    for transfer in handle.loop.in_flight:
        if isinstance(transfer, Transfer):
            transfer.pending.wait()


def run(job: Job, arguments: argparse.Namespace) -> None:
    """Train, and write `cluster_<m>.json`: per step and cumulative, and the validation loss."""
    cluster = arguments.cluster
    inner, handle = start(job, arguments)
    turns = Turns(job, cluster)
    alone = Walk(job, cluster, start_alone(job).take_step) if handle else None
    walk = Walk(job, cluster, inner.take_step, lambda: counters(handle) if handle else {})
    turns.begin()
    began, first = time.perf_counter(), read_line()
    course = train(job, walk, alone, lambda: settle(handle) if handle else None)
    payload_bytes = 0
    if handle:
        handle.loop.drain()
        payload_bytes = handle.totals.bytes_sent
        handle.finish()  # which compares what was applied, beside the payload
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
            "syncs": handle.totals.syncs if handle else 0,
            "wait_seconds": handle.totals.wait_seconds if handle else 0.0,
            "blocked_seconds": handle.totals.blocked_seconds if handle else 0.0,
            "validation_loss": validate(inner.model, handle, job),
        }
    )
    if handle:
        handle.close()


def counters(handle: Handle) -> dict[str, float]:
    """Return what dsx has counted so far."""
    return {"wait_seconds": handle.totals.wait_seconds, "bytes_sent": handle.totals.bytes_sent}


@torch.no_grad()
def validate(model: torch.nn.Module, handle: Handle | None, job: Job) -> float:
    """Return the loss of the finished model: of the clusters' average where dsx makes one."""
    windows = validation_windows(job)
    model.eval()
    with handle.averaged() if handle else nullcontext():
        return model(windows[:, :-1], windows[:, 1:]).item()


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
