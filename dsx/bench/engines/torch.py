"""Plain PyTorch: a module, under DistributedDataParallel, or cut by FSDP2."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from dsx.bench.engines.combinations import Combination
from dsx.bench.engines.job import RATE, SEED, SHAPE
from dsx.bench.gpu.engines import shard
from dsx.examples.gpt import GPT


def warm() -> None:
    """Import what ranks need."""
    for name in ("dsx.engines.attach", "torch.distributed.fsdp", "torch.nn.parallel"):
        importlib.import_module(name)


def build(given: Combination, vocab_size: int, config: dict[str, Any] | None) -> Plain:
    """Return a model, with dsx attached if there is a configuration for it."""
    return Plain(given, vocab_size, config)


class Plain:
    """One rank."""

    def __init__(self, given: Combination, vocab_size: int, config: dict[str, Any] | None) -> None:
        net = GPT(replace(SHAPE, vocab_size=vocab_size), SEED)
        self._model: nn.Module = net
        if given.wrap == "ddp":
            self._model = nn.parallel.DistributedDataParallel(net)
        elif given.wrap == "fsdp2":
            shard(net, "cpu")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE)
        self.handle: dsx.Handle | None = None
        if config is not None:
            self.handle = dsx.attach(self._model, self._optimizer, config=config)
        self.data_rank, self.num_data_ranks = dist.get_rank(), dist.get_world_size()

    def step(self, batches: Sequence[Tensor]) -> float:
        """Take one step."""
        self._optimizer.zero_grad()
        total = 0.0
        for tokens in batches:
            loss = self._model(tokens[:, :-1], tokens[:, 1:]) / len(batches)
            loss.backward()
            total += loss.item()
        self._optimizer.step()
        return total

    def evaluate(self, batches: Sequence[Tensor]) -> float:
        """Return the mean loss."""
        with torch.no_grad():
            losses = [self._model(tokens[:, :-1], tokens[:, 1:]) for tokens in batches]
        return torch.stack(losses).mean().item()

    def parameters(self) -> Iterable[Tensor]:
        """Yield the parameters, of a sharded one this rank's part."""
        for parameter in self._model.parameters():
            local: Any = parameter.detach()
            yield local.to_local() if hasattr(local, "to_local") else local
