"""DeepSpeed: ZeRO 0 to 3 over data-parallel ranks, or a pipeline of stages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.bench.chaos.engines.deepspeed import warm as warm_deepspeed
from dsx.bench.engines.combinations import Combination
from dsx.bench.engines.job import MICRO, RATE, ROWS, SEED, SHAPE
from dsx.bench.gpu.engines import gathered
from dsx.examples.gpt import GPT


def warm() -> None:
    """Import what ranks need."""
    warm_deepspeed()
    import deepspeed.pipe  # noqa: F401  # pyright: ignore[reportUnusedImport]


def build(given: Combination, vocab_size: int, config: dict[str, Any] | None) -> Zero | Pipeline:
    """Return a model, with dsx attached if there is a configuration for it."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed("gloo", verbose=False)
    model: Any = GPT(replace(SHAPE, vocab_size=vocab_size), SEED)
    num_data_ranks = dist.get_world_size() // given.pipeline
    if given.pipeline > 1:
        from dsx.examples.gpt_pipeline import as_pipeline

        model = as_pipeline(model, given.pipeline)
    settings = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ROWS // (MICRO * num_data_ranks),
        "bf16": {"enabled": given.is_bf16},
        "zero_optimization": {"stage": given.zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **(config or {}),
    }
    initialize: Any = deepspeed.initialize if config is None else dsx.initialize
    engine = initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    handle = None if config is None else engine.dsx
    return Pipeline(engine, handle) if given.pipeline > 1 else Zero(engine, handle)


class Zero:
    """One data-parallel rank."""

    def __init__(self, engine: Any, handle: dsx.Handle | None) -> None:
        self._engine, self.handle = engine, handle
        self.data_rank, self.num_data_ranks = dist.get_rank(), dist.get_world_size()

    def step(self, batches: Sequence[Tensor]) -> float:
        """Take one step."""
        total = 0.0
        for tokens in batches:
            loss = self._engine(tokens[:, :-1], tokens[:, 1:])
            self._engine.backward(loss)
            self._engine.step()
            total += loss.item()
        return total / len(batches)

    def evaluate(self, batches: Sequence[Tensor]) -> float:
        """Return the mean loss."""
        with torch.no_grad():
            losses = [self._engine(tokens[:, :-1], tokens[:, 1:]) for tokens in batches]
        return torch.stack(losses).float().mean().item()

    def parameters(self) -> Iterable[Tensor]:
        """Yield the parameters, gathered where they are taken apart."""
        return gathered(self._engine.module)


class Pipeline:
    """One stage."""

    def __init__(self, engine: Any, handle: dsx.Handle | None) -> None:
        self._engine, self.handle = engine, handle
        self.data_rank = dist.get_rank(engine.data_parallel_group)
        self.num_data_ranks: int = engine.dp_world_size

    def step(self, batches: Sequence[Tensor]) -> float:
        """Take one step; all stages are told the loss."""
        from dsx.examples.gpt_pipeline import with_targets

        return self._engine.train_batch(with_targets(batches)).item()

    def evaluate(self, batches: Sequence[Tensor]) -> float:
        """Return the mean loss."""
        from dsx.examples.gpt_pipeline import with_targets

        pairs = with_targets(batches)
        return self._engine.eval_batch(pairs, num_micro_batches=len(batches)).item()

    def parameters(self) -> Iterable[Tensor]:
        """Yield those of this stage."""
        for parameter in self._engine.module.parameters():
            yield parameter.detach()
