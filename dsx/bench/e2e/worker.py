"""One rank of `dsx bench e2e`: trains a small GPT as its job says and writes down every step.

    deepspeed --num_gpus 1 --module dsx.bench.e2e.worker --job job.json --cluster 0

The same model, batches and inner optimizer whatever the clusters do: nothing (`ceiling`),
DeepSpeed's own all-reduce in every step (`data_parallel`), or a preset (`dsx`). In the run of a
preset an engine without it, in the same process, measures the ceiling before and after every block
of rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import dsx
from dsx.bench.e2e.inner import DeepSpeedInner, Inner
from dsx.bench.e2e.job import Job
from dsx.bench.e2e.loop import TimedSteps, Turns, read_line, train, validation_loss
from dsx.engines.deepspeed.engine import adopt_world
from dsx.outer.transfer import Transfer
from dsx.training.handle import Handle


def start(job: Job, arguments: argparse.Namespace) -> tuple[Inner, Handle | None]:
    """Return who takes inner steps: alone, or with the outer training of the config."""
    if job.mode == "dsx":
        dsx.init_distributed(job.config, arguments)
    else:
        dist.init_process_group("gloo")  # the launcher's world, over all clusters or of this one
        adopt_world()
    if job.mode == "dsx":
        trained = DeepSpeedInner(job, dsx.initialize, job.config)
        return trained, trained.engine.dsx
    return DeepSpeedInner(job, deepspeed.initialize, job.config), None


def without_dsx(job: Job) -> Inner:
    """Return the same inner training as `start`, without dsx and any communication."""
    config = {key: value for key, value in job.config.items() if key != "dsx"}
    return DeepSpeedInner(job, deepspeed.initialize, config)


def settle(handle: Handle) -> None:
    """Wait for all that is under way; it is applied when its time has come, as otherwise."""
    for transfer in handle.loop.in_flight:
        if isinstance(transfer, Transfer):
            transfer.pending.wait()


def run(job: Job, arguments: argparse.Namespace) -> None:
    """Train, and write `cluster_<m>.json`: after each step the sums so far, and what it came to."""
    cluster, turns = arguments.cluster, Turns(job, arguments.cluster)
    inner, handle = start(job, arguments)
    if handle is None:
        turns.write(run_without_dsx(job, cluster, inner, turns))
    else:
        turns.write(run_with_dsx(job, cluster, inner, handle, turns))
        handle.close()


def run_without_dsx(job: Job, cluster: int, inner: Inner, turns: Turns) -> dict[str, Any]:
    """Train; return what is written."""
    trained = TimedSteps(job, cluster, inner.take_step)
    turns.begin()
    recorded = train(job, trained, None, lambda: None)
    turns.end()
    return {"steps": recorded.steps, "validation_loss": validation_loss(inner.model, job)}


def run_with_dsx(
    job: Job, cluster: int, inner: Inner, handle: Handle, turns: Turns
) -> dict[str, Any]:
    """Train, with the ceiling between blocks; return what is written."""
    trained = TimedSteps(job, cluster, inner.take_step, Counters(handle).read)
    ceiling = TimedSteps(job, cluster, without_dsx(job).take_step)
    turns.begin()
    first = read_line().bytes_sent
    recorded = train(job, trained, ceiling, lambda: settle(handle))
    handle.loop.drain()
    bytes_sent = handle.totals.bytes_sent
    handle.finish()  # which compares what was applied, beside the payload
    wire_bytes = read_line().bytes_sent - first  # what sockets still held at a pause is sent in it
    turns.end()
    with handle.averaged():
        loss = validation_loss(inner.model, job)
    return {
        "steps": recorded.steps,
        "ceilings": recorded.ceilings,
        "wire_bytes": wire_bytes,
        "bytes_sent": bytes_sent,
        "blocked_seconds": handle.totals.blocked_seconds,
        "validation_loss": loss,
    }


class Counters:
    """What dsx has counted so far; read after every step."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._seen = dict[int, Transfer]()
        self._transfer_seconds = 0.0

    def read(self) -> dict[str, float]:
        """Return sums; `transfer_seconds` are those of the transfers that have been applied."""
        for fragment, transfer in self._handle.loop.last_applied.items():
            if self._seen.get(fragment) is not transfer:
                self._seen[fragment] = transfer
                self._transfer_seconds += transfer.pending.seconds
        totals = self._handle.totals
        return {
            "wait_seconds": totals.wait_seconds,
            "transfer_seconds": self._transfer_seconds,
            "bytes_sent": totals.bytes_sent,
        }


def parse_arguments() -> argparse.Namespace:
    """Return what the runner and the launcher tell a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--cluster", type=int, required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    dsx.add_config_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Run the job that the command line names."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    run(Job.read(arguments.job), arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
