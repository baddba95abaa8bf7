"""DeepSpeed, ZeRO 0 to 3: a cluster's ranks are data-parallel, and each reads samples of its own.

The engine is made by `dsx.initialize`, as a script makes it, and reads its `training_data`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import dsx
from dsx.bench.chaos.engines.engine import Step, digest
from dsx.bench.chaos.engines.teacher import RATE, Net, Numbers, Teacher
from dsx.bench.chaos.job import Job

_IMPORTS = (
    "torch.utils.cpp_extension",  # DeepSpeed's builders of operators
    "torch._inductor.compile_fx",  # it decorates an optimizer with torch.compile
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage3",
    "dsx.engines.attach",
    "dsx.engines.deepspeed.engine",
    "dsx.engines.deepspeed.checkpoint",
    "dsx.engines.deepspeed.data",
)


def warm() -> None:
    """Import what ranks need."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # the bench hides GPUs, which DeepSpeed would look for
    os.environ["TORCH_WARM_POOL"] = "0"  # torch 2.6 starts threads where its compiler is imported
    for name in _IMPORTS:
        importlib.import_module(name)
    ops: Any = importlib.import_module("deepspeed.ops")
    ops.__compatible_ops__  # noqa: B018 - a compiler is asked, once for all ranks


def build(job: Job, cluster: int, rank: int) -> DataParallel:
    """Join the run, and return a model with dsx attached. Collective over all clusters."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    dsx.init_distributed(job.dsx(cluster))
    return DataParallel(job, cluster)


class DataParallel:
    """One rank."""

    def __init__(self, job: Job, cluster: int) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        kind: Any = DeepSpeedEngine
        # in this process: two more of each rank would be many, and outlive one that is killed
        kind.deepspeed_io = functools.partialmethod(kind.deepspeed_io, num_local_io_workers=0)
        self._teacher, net = Teacher(job.seed), Net(job.seed)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": job.zero_stage},
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
            "steps_per_print": 10**9,
            **job.dsx(cluster),
        }
        made = dsx.initialize(
            model=net, model_parameters=net.parameters(), training_data=Numbers(), config=config
        )
        self._engine, self._loader = made[0], made[2]
        self.handle: dsx.Handle = self._engine.dsx
        self._samples = self._read()

    def masters(self) -> Sequence[Tensor]:
        """Return this rank's partitions, or the parameters where they are not divided."""
        from dsx.engines.deepspeed.masters import locate

        return locate(self._engine).optimizer_tensors()

    def step(self) -> Step:
        """Take one step; each rank on a sample of its own."""
        own = next(self._samples)
        inputs, targets = self._teacher.batch_of(own.flatten().tolist())
        loss = F.mse_loss(self._engine(inputs), targets)
        self._engine.backward(loss)
        self._engine.step()
        read = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(read, own)
        return Step([int(number) for one in read for number in one.flatten()], loss.item())

    def save(self, base: Path, tag: str) -> None:
        """Save as DeepSpeed does."""
        self._engine.dsx.preemption.engine.save(base, tag)  # as save_checkpoint, but says why

    def evaluate(self) -> float:
        """Return the mean squared error."""
        return self._teacher.loss_of(self._engine.module)

    def weights_hash(self) -> str:
        """Return a hash of the parameters, which all ranks hold whole, or gather."""
        import deepspeed

        parameters = [*self._engine.module.parameters()]
        sharded = [p for p in parameters if hasattr(p, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded):
            return digest(parameters)

    def _read(self) -> Iterator[Tensor]:
        """Yield numbers, int64 [1, 1], epoch after epoch."""
        while True:
            yield from self._loader
