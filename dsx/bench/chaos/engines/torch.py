"""Plain PyTorch: DistributedDataParallel over a cluster's ranks, which share each sample's rows."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import dsx
from dsx.bench.chaos.engines.engine import Step, digest
from dsx.bench.chaos.engines.own_saves import OwnSaves
from dsx.bench.chaos.engines.teacher import RATE, Net, Numbers, Teacher
from dsx.bench.chaos.job import Job
from dsx.data import ClusterBatches


def warm() -> None:
    """Import what ranks need."""
    importlib.import_module("dsx.engines.attach")


def build(job: Job, cluster: int, rank: int) -> Ddp:
    """Join the run, and return a model with dsx attached. Collective over all clusters."""
    dsx.init_distributed(job.dsx(cluster))
    return Ddp(job, cluster, rank)


class Ddp:
    """One rank."""

    def __init__(self, job: Job, cluster: int, rank: int) -> None:
        self._teacher, self._net = Teacher(job.seed), Net(job.seed)
        self._model = DistributedDataParallel(self._net)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE)
        self.handle = dsx.attach(self._model, self._optimizer, config=job.dsx(cluster))
        self._batches = ClusterBatches(  # all ranks of a cluster share a sample
            Numbers(), 1, cluster_id=cluster, num_clusters=job.num_clusters, rank=0, world_size=1,
            seed=job.seed,
        )  # fmt: skip
        self.handle.track(data=self._batches)
        self._saves = OwnSaves(self.handle, self._state)
        self._own, self._is_first = slice(rank, None, job.num_ranks), rank == 0

    def masters(self) -> Sequence[Tensor]:
        """Return the parameters."""
        return [*self._net.parameters()]

    def step(self) -> Step:
        """Take one step on a sample, of which this rank has its share of rows."""
        sample = int(next(self._batches))
        inputs, targets = self._teacher.batch_of([sample])
        loss = F.mse_loss(self._model(inputs[self._own]), targets[self._own])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return Step([sample], loss.item())

    def save(self, base: Path, tag: str) -> None:
        """Save the outer state, and beside it model and optimizer, of which all have the same."""
        self._saves.save(base, tag)

    def _state(self) -> dict[str, Any] | None:
        if not self._is_first:
            return None
        return {"model": self._net.state_dict(), "optimizer": self._optimizer.state_dict()}

    def evaluate(self) -> float:
        """Return the mean squared error."""
        return self._teacher.loss_of(self._net)

    def weights_hash(self) -> str:
        """Return a hash of the parameters, which all ranks hold whole."""
        return digest(self._net.parameters())
