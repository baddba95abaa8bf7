"""What a rank's loop asks of an engine, and how an engine is found by its name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from dsx.bench.chaos.job import EngineName, Job
from dsx.training.handle import Handle


class Step(NamedTuple):
    """One inner step: the numbers of what the cluster has read for it, and this rank's loss."""

    samples: list[int]
    loss: float


class Engine(Protocol):
    """One rank of a cluster that trains, with dsx attached."""

    @property
    def handle(self) -> Handle:
        """The handle that dsx gives a script."""
        ...

    def masters(self) -> Sequence[Tensor]:
        """Return the fp32 tensors that this rank's launches read, as they lie in the engine."""
        ...

    def step(self) -> Step:
        """Read, and take one inner step. Collective in the cluster."""
        ...

    def save(self, base: Path, tag: str) -> None:
        """Save all there is as `base/cluster_<m>/<tag>`. Collective in the cluster.

        OSError on all its ranks where any cannot write; then nothing is left of it.
        """
        ...

    def evaluate(self) -> float:
        """Return the loss of samples that nobody trains on. Collective in the cluster."""
        ...

    def weights_hash(self) -> str:
        """Return a hash of the whole model: one where all ranks of all clusters hold the same.

        Collective in the cluster.
        """
        ...


class Module(Protocol):
    """The module of an engine."""

    def warm(self) -> None:
        """Import what ranks need; nothing may be started that a fork would not survive."""
        ...

    def build(self, job: Job, cluster: int, rank: int) -> Engine:
        """Join the run, and return a model with dsx attached. Collective over all clusters."""
        ...


def module_of(name: EngineName) -> Module:
    """Return the module of an engine; of what it needs nothing is imported by that."""
    return cast("Module", importlib.import_module(f"dsx.bench.chaos.engines.{name}"))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of some tensors, in their order."""
    hasher = blake2b(digest_size=8)
    for tensor in tensors:
        bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        hasher.update(bits.numpy().tobytes())
    return hasher.hexdigest()
