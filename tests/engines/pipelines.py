"""Pipelines of two stages for two clusters, and the same training in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsx
from dsx.comm.world import current_world
from tests.engines.engines import ACCUMULATION, NUM_CLUSTERS, ds_config, make_optimizer
from tests.reference import Recipe, Reference
from tests.reference_schedules import Clock, due_streaming
from tests.tiny import WIDTH, H, batch

NUM_STAGES = 2
STREAM = {
    "schedule": {"interval": H},
    "fragments": {"num_fragments": 2},
    "delay": {"steps": 2, "alpha": 0.3},
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "streaming_diloco": STREAM,
    "diloco": {"schedule": {"interval": H}},
    "co2": {"schedule": {"interval": H}},
    "eager": {"schedule": {"interval": H}, "outer_optimizer": {"lr": 0.3}},
    "dreamddp": {
        "schedule": {"interval": 3, "backward_seconds": [1.0] * 2, "transfer_seconds": [1.0] * 2},
        "fragments": {"num_fragments": 2},
    },
}
RECIPES = {
    "streaming_diloco": Recipe([], H, True, 2, 0.3, "nesterov", 0.4, 0.9),
    "diloco": Recipe([], H, False, 0, 1.0, "nesterov", 0.7, 0.9),
    "co2": Recipe(
        [], H, False, 0, 1.0, "momentum", 0.5, 0.2, delay="delayed", penalty="tensor"
    ),
    "eager": Recipe([], H, False, 0, 1.0, "nesterov", 0.3, 0.9, delay="eager"),
    "dreamddp": Recipe(
        [], 3, False, 0, 1.0, "none", 0.0,
        delay="average", when="before", table=[(1, 0), (1,), (1,)],
    ),
}  # fmt: skip
# Layers 0..5; with ties, 0 and 5 are the same one. Two fragments per stage, strided.
PLAIN = [[["0", "2"], ["1"]], [["3", "5"], ["4"]]]
TIED = [[["ends", "1"], ["2"]], [["shift", "3"], ["4"]]]


class Kind(NamedTuple):
    """ZeRO stage, data types, whether ends are tied, parameter groups, inner optimizer, preset."""

    stage: int
    precision: str = "fp32"
    is_tied: bool = False
    groups: str = "one"
    optimizer: str = "sgd"
    preset: str = "streaming_diloco"

    def __str__(self) -> str:
        parts = [self.stage, self.precision, "tied" if self.is_tied else "plain", *self[3:]]
        return "-".join(map(str, parts))


class Block(nn.Module):
    """A layer in the middle."""

    def __init__(self, seed: int, width: int = WIDTH) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) * 0.4)
        self.bias = nn.Parameter(torch.randn(width, generator=generator) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias))


class Ends(nn.Module):
    """First and last layer: the weight is tied, the shift is each stage's own.

    No `forward_fn`: of a tied layer with one, DeepSpeed 0.19.8 saves what is tied only.
    """

    def __init__(self, seed: int, width: int = WIDTH) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) * 0.4)
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight) + self.shift)


class Chain(nn.Module):
    """All layers in one module; parameters are named as in the pipeline."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {str(i): Block(i) for i in (range(1, 5) if is_tied else range(6))}
        )
        self.ends = Ends(0) if is_tied else None
        self.last_shift = nn.Parameter(torch.zeros(WIDTH)) if is_tied else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.ends is not None:
            x = self.ends(x)
        for block in self.blocks.values():
            x = block(x)
        if self.ends is not None:
            x = torch.tanh(F.linear(x, self.ends.weight) + self.last_shift)
        return F.mse_loss(x, y)

    def by_name(self) -> dict[str, Tensor]:
        renamed = {
            "ends.weight": "tied_modules.ends.weight",
            "ends.shift": "tied_modules.ends.shift",
            "last_shift": "stage_1.tied_modules.ends.shift",
        }
        return {renamed.get(n, n.removeprefix("blocks.")): p for n, p in self.named_parameters()}


def fragments_of(kind: Kind) -> list[list[list[str]]]:
    """The names in each fragment of each stage."""
    layers = TIED if kind.is_tied else PLAIN
    parts = {
        "ends": ["tied_modules.ends.weight", "tied_modules.ends.shift"],
        "shift": ["stage_1.tied_modules.ends.shift"],
    }
    names = [
        [[n for key in fragment for n in parts.get(key, [f"{key}.weight", f"{key}.bias"])]
         for fragment in stage]
        for stage in layers
    ]  # fmt: skip
    if RECIPES[kind.preset].streaming or RECIPES[kind.preset].table:
        return names
    return [[[n for fragment in stage for n in fragment]] for stage in names]


def param_groups(named: dict[str, Any], groups: str) -> list[dict[str, Any]]:
    if groups == "one":
        return [{"params": list(named.values())}]
    vectors = [p for p in named.values() if p.dim() == 1]
    return [{"params": [p for p in named.values() if p.dim() > 1]}, {"params": vectors, "lr": 0.05}]


def build_pipeline(
    kind: Kind, dsx_changes: dict[str, Any] | None = None, num_stages: int = NUM_STAGES
) -> Any:
    return dsx.initialize(**engine_arguments(kind, dsx_changes, num_stages))[0]


def engine_arguments(
    kind: Kind, dsx_changes: dict[str, Any] | None = None, num_stages: int = NUM_STAGES
) -> dict[str, Any]:
    config = ds_config(kind.stage, kind.precision, "diloco")
    clusters = config["dsx"]["clusters"]
    overrides = {**OVERRIDES.get(kind.preset, {}), **(dsx_changes or {})}
    config["dsx"] = {"preset": kind.preset, "clusters": clusters, **overrides}
    if current_world() is None:
        import deepspeed  # noqa: F401 - which then joins the world

        dsx.init_distributed(config)
    model = make_module(kind, current_world().cluster_id, num_stages)
    groups = param_groups(dict(model.named_parameters()), kind.groups)
    return {"model": model, "config": config, "optimizer": make_optimizer(kind.optimizer, groups)}


def make_module(kind: Kind, seed: int, num_stages: int) -> Any:
    """Layers of other weights in every cluster: cluster 0's are taken."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    shift = 100 * seed
    if kind.is_tied:
        layers = [
            TiedLayerSpec("ends", Ends, shift),
            *(LayerSpec(Block, i + shift) for i in range(1, 5)),
            TiedLayerSpec("ends", Ends, shift),
        ]
    else:
        layers = [LayerSpec(Block, i + shift) for i in range(6)]
    return PipelineModule(
        layers,
        num_stages=num_stages,
        loss_fn=lambda x, y: F.mse_loss(x.float(), y.float()),
        partition_method="uniform",
    )


def train_batch(engine: Any, step: int, poison: bool = False, cluster: int | None = None) -> float:
    """Take one step; `cluster` for an engine without dsx."""
    cluster = engine.dsx.cluster_id if cluster is None else cluster
    dtype = next(engine.module.parameters()).dtype
    batches = []
    for micro in range(ACCUMULATION):
        part = engine.grid.get_data_parallel_rank() * ACCUMULATION + micro
        x, y = batch(cluster, step, part)
        batches.append(((x * float("inf") if poison else x).to(dtype), y))
    return engine.train_batch(iter(batches)).item()


@dataclass
class StageReference(Reference):
    """The outer training of one stage, shifted against those before it."""

    index: int = 0

    def due(self, step: int) -> Sequence[int]:
        if not self.recipe.streaming:
            return super().due(step)
        count = len(self.recipe.fragments)
        shift = self.index * self.recipe.interval // (count * NUM_STAGES)
        return due_streaming(step - shift, self.recipe.interval, count)


def reference(
    kind: Kind, num_steps: int, parts: int, skipped: Sequence[tuple[int, int]] = ()
) -> list[dict[str, Tensor]]:
    """Every cluster's weights after the same training, in fp32."""
    models = [Chain(kind.is_tied) for _ in range(NUM_CLUSTERS)]
    local = [model.by_name() for model in models]
    optimizers = [make_optimizer(kind.optimizer, param_groups(p, kind.groups)) for p in local]
    references = []
    with torch.no_grad():
        for index, fragments in enumerate(fragments_of(kind)):
            recipe = replace(RECIPES[kind.preset], fragments=fragments)
            names = [n for fragment in fragments for n in fragment]
            own = [{n: parameters[n] for n in names} for parameters in local]
            references.append(StageReference(recipe, own, Clock(len(fragments)), index=index))
    for step in range(1, num_steps + 1):
        before = [copy.deepcopy(parameters) for parameters in local]
        for m, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = sum(model(*batch(m, step, part)) for part in range(parts)) / parts
            loss.backward()
            if (m, step) not in skipped:
                optimizer.step()
        with torch.no_grad():
            for one in references:
                one.boundary(step, before)
    return [{n: p.detach().clone() for n, p in parameters.items()} for parameters in local]
