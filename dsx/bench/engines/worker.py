"""A rank of a run: it trains, evaluates, and writes what it has seen."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.bench.chaos.engines.engine import digest
from dsx.bench.engines.job import EVALUATED, MICRO, ROWS, SEED, SHAPE, Job, Seen, seen_path
from dsx.bench.engines.trainer import module_of
from dsx.data import ClusterBatches, TokenWindows, read_summary


def train(directory: Path, cluster: int, rank: int) -> None:
    """Train as the job of a folder says, as this rank of this cluster."""
    job = Job.read(directory)
    config = job.dsx(cluster)
    if config is None:
        dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    else:
        dsx.init_distributed(config)
    data = Path(job.data)
    engine = module_of(job.combination.engine)
    trainer = engine.build(job.combination, read_summary(data).vocab_size, config)
    batches = ClusterBatches(
        TokenWindows(data / "train", SHAPE.sequence_length), MICRO, cluster_id=cluster,
        num_clusters=job.num_clusters, rank=trainer.data_rank, world_size=trainer.num_data_ranks,
        seed=SEED,
    )  # fmt: skip
    per_step = ROWS // (MICRO * trainer.num_data_ranks)
    told = [trainer.step([next(batches) for _ in range(per_step)]) for _ in range(job.steps)]
    losses = [loss for loss in told if loss is not None]
    handle = trainer.handle
    if handle is not None:
        handle.finish()
    weights = digest(trainer.parameters())
    with nullcontext() if handle is None else handle.averaged():
        average = digest(trainer.parameters())
        windows = TokenWindows(data / "validation", SHAPE.sequence_length)
        validation = trainer.evaluate(_held_out(windows))
    seen = Seen(losses, validation, weights, average)
    seen_path(directory, cluster, rank).write_text(json.dumps(asdict(seen)))
    if handle is not None:
        handle.close()


def _held_out(windows: TokenWindows) -> Sequence[Tensor]:
    """Return evenly spread windows in micro-batches."""
    chosen = [windows[i * len(windows) // EVALUATED] for i in range(EVALUATED)]
    return [torch.stack(chosen[at : at + MICRO]) for at in range(0, EVALUATED, MICRO)]
