"""One cluster of `dsx bench torchft`: trains the bench's GPT with torchft's own DiLoCo.

It starts from the weights, takes the batches and goes through the steps of `dsx.bench.e2e.worker`,
with torch's AdamW and clipping where that has DeepSpeed's engine, set up the same. The ceiling is
the same steps without torchft. torchft's heartbeats go on meanwhile, as they do in a training.

Each cluster is a replica group of one rank. Its store, its manager and, in cluster 0, the
lighthouse listen at the cluster's address on the line. All start from the same weights, so nothing
is recovered at first (`init_sync`), and all must take part in every sync.
"""

# torchft need not be installed where types are checked:
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.optim import SGD
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from dsx.bench.e2e.inner import PlainInner
from dsx.bench.e2e.job import Job, TinyGPT
from dsx.bench.e2e.loop import TimedSteps, Turns, read_line, train, validation_loss

LIGHTHOUSE_PORT, _STORE_PORT = 29510, 29500


def model_fragments(model: TinyGPT, count: int) -> list[nn.Module]:
    """Return the model whole, or in runs of layers; the ends have embeddings and head.

    torchft asks a fragment for its named parameters and nothing else. The positions belong to no
    module of their own, so each fragment is a list of parameters.
    """
    per_fragment = len(model.layers) // count
    fragments: list[list[nn.Parameter]] = [[] for _ in range(count)]
    fragments[0] += [*model.embedding.parameters(), model.positions]
    for number, layer in enumerate(model.layers):
        fragments[number // per_fragment] += layer.parameters()
    fragments[-1] += [*model.norm.parameters(), *model.head.parameters()]
    return [nn.ParameterList(parameters) for parameters in fragments]


@contextmanager
def replica_group(job: Job, arguments: argparse.Namespace) -> Iterator[Manager]:
    """Start torchft's manager, in cluster 0 after the lighthouse; shut them down at the end."""
    address, cluster = f"10.77.0.{arguments.cluster + 1}", arguments.cluster
    lighthouse = None
    if cluster == 0:
        lighthouse = LighthouseServer(
            f"{address}:{LIGHTHOUSE_PORT}", job.num_clusters, join_timeout_ms=60_000
        )
    # an all-reduce takes minutes on a slow line, and whoever fails fails the run
    wait = timedelta(seconds=job.deadline_seconds)
    store = TCPStore(address, _STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait), load_state_dict=None, state_dict=None,
        min_replica_size=job.num_clusters, use_async_quorum=False, timeout=wait,
        quorum_timeout=wait, connect_timeout=wait, rank=0, world_size=1, store_addr=address,
        store_port=store.port, lighthouse_addr=f"http://10.77.0.1:{LIGHTHOUSE_PORT}",
        replica_id=f"cluster_{cluster}", hostname=address, init_sync=False, max_retries=0,
    )  # fmt: skip
    try:
        yield manager
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def start_diloco(inner: PlainInner, manager: Manager, arguments: argparse.Namespace) -> DiLoCo:
    """Return torchft's DiLoCo around the inner optimizer, not yet entered."""
    fragments = model_fragments(inner.model, arguments.fragments)
    return DiLoCo(
        manager, fragments, inner.optimizer,
        [
            SGD(part.parameters(), lr=arguments.outer_lr, momentum=arguments.outer_momentum,
                nesterov=True)
            for part in fragments
        ],
        sync_every=arguments.interval, fragment_sync_delay=arguments.delay,
        fragment_update_alpha=arguments.local_weight,
    )  # fmt: skip


def run(job: Job, arguments: argparse.Namespace, manager: Manager) -> None:
    """Train, and write what `dsx.bench.e2e.worker` writes."""
    inner, turns = PlainInner(job), Turns(job, arguments.cluster)
    diloco = start_diloco(inner, manager, arguments)
    trained = TimedSteps(job, arguments.cluster, inner.take_step)
    ceiling = TimedSteps(job, arguments.cluster, PlainInner(job).take_step)
    turns.begin()
    first = read_line().bytes_sent
    with diloco:  # which has nothing under way after whole rounds, so there is none to wait for
        recorded = train(job, trained, ceiling, lambda: None)
    wire_bytes = read_line().bytes_sent - first - recorded.bytes_in_pauses
    turns.end()
    syncs = job.steps * arguments.fragments // arguments.interval
    if manager.current_step() != syncs:
        raise RuntimeError(f"torchft has committed {manager.current_step()} of {syncs} syncs")
    turns.write(
        {
            "steps": recorded.steps,
            "ceilings": recorded.ceilings,
            "wire_bytes": wire_bytes,
            "bytes_sent": payload_bytes(inner.model, job, arguments.interval),
            "validation_loss": validate(inner.model, job, manager),
        }
    )


def payload_bytes(model: nn.Module, job: Job, interval: int) -> int:
    """Return what all-reduces of the whole model in fp32 send per cluster: computed, not counted.

    torchft counts no bytes. It takes 2 (C - 1) / C of the buffer, as of the ring and as dsx has it.
    """
    numel = sum(parameter.numel() for parameter in model.parameters())
    clusters = job.num_clusters
    return job.steps // interval * (2 * (clusters - 1) * 4 * numel // clusters)


@torch.no_grad()
def validate(model: nn.Module, job: Job, manager: Manager) -> float:
    """Return the loss of the clusters' average, which differs from the models with fragments."""
    for parameter in model.parameters():
        manager.allreduce(parameter.data).wait()
    if error := manager.errored():
        raise RuntimeError("the clusters' models could not be averaged") from error
    return validation_loss(model, job)


def main() -> None:
    """Run the job that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--cluster", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--local-weight", type=float, default=0.0)
    parser.add_argument("--outer-lr", type=float, required=True)
    parser.add_argument("--outer-momentum", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job = Job.read(arguments.job)
    with replica_group(job, arguments) as manager:
        run(job, arguments, manager)


if __name__ == "__main__":
    main()
