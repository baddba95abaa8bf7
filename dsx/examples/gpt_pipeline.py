"""The GPT of gpt.py as a DeepSpeed pipeline: its layers in a row, a run of them on each stage.

Invariant: the same config and seed give the same weights and losses as without a pipeline. Every
rank draws all of the weights on its host first, which a model of real size would not.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from dsx.examples.gpt import GPT, GPTConfig, Layer, language_loss, rotary_angles


class First(nn.Module):
    """From tokens to the residual stream."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embedding = model.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `[batch, length]` to `[batch, length, hidden]`."""
        return self.embedding(tokens)


class Middle(nn.Module):
    """One transformer layer, which computes its rotary angles itself."""

    def __init__(self, layer: Layer, config: GPTConfig) -> None:
        super().__init__()
        self.layer = layer
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, length, hidden]` to the same shape."""
        return self.layer(x, *rotary_angles(self.config, x.shape[1], x.device))


class Last(nn.Module):
    """From the residual stream to logits."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm = model.norm
        self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, length, hidden]` to `[batch, length, vocab]`."""
        return self.head(self.norm(x))


def as_pipeline(model: GPT, num_stages: int) -> PipelineModule:
    """Cut a model into stages of about equal numbers of parameters.

    ValueError if the cluster's ranks, or the layers, do not make as many.
    """
    ranks = dist.get_world_size()
    middle = [Middle(cast(Layer, layer), model.config) for layer in model.layers]
    layers = [First(model), *middle, Last(model)]
    if ranks % num_stages or num_stages > len(layers):
        raise ValueError(
            f"--pipeline-stages {num_stages} must divide the cluster's {ranks} ranks, and be at "
            f"most its {len(layers)} layers, embedding and head counted"
        )

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return language_loss(logits, targets, model.config.z_loss if pipeline.training else 0.0)

    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the topology
        pipeline = PipelineModule(layers, num_stages=num_stages, loss_fn=loss_of)
    return pipeline


def with_targets(batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what a pipeline takes, inputs and targets, from windows `[batch, length + 1]`."""
    return ((windows[:, :-1], windows[:, 1:]) for windows in batches)


def gather_weights(engine: Any) -> dict[str, Tensor]:
    """Return all stages' weights by their names in `GPT` on rank 0; all ranks of a cluster call."""
    own: dict[str, Tensor] = {}
    if engine.grid.get_data_parallel_rank() == 0:
        for name, weight in engine.module.state_dict().items():
            own[name_in_gpt(name)] = weight.to("cpu")
    is_writer = dist.get_rank() == 0
    stages: list[Any] | None = [None] * dist.get_world_size() if is_writer else None
    dist.gather_object(own, stages)
    return {name: weight for stage in stages or [] for name, weight in stage.items()}


def name_in_gpt(name: str) -> str:
    """Return the name in `GPT` of a parameter of the pipeline, whose first part is its place."""
    place, _, inner = name.partition(".")
    if inner.startswith("layer."):
        return f"layers.{int(place) - 1}.{inner.removeprefix('layer.')}"
    return inner
