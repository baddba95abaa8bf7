"""A model of a few hundred parameters, its data, and the four baselines on it, for all tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference import Recipe

WIDTH = 6
NUM_LAYERS = 4
LAYERS = [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(NUM_LAYERS)]
ALL = [name for layer in LAYERS for name in layer]
H = 4

# preset -> (overrides of the "dsx" block, the same in the papers' symbols)
CASES: dict[str, tuple[dict[str, Any], Recipe]] = {
    "local_sgd": (
        {"schedule": {"interval": H}},
        Recipe([ALL], H, False, 0, 1.0, "sgd", 1.0),
    ),
    "slowmo": (
        {"schedule": {"interval": H}, "outer_optimizer": {"lr": 0.9, "momentum": 0.5}},
        Recipe([ALL], H, False, 0, 1.0, "momentum", 0.9, 0.5),
    ),
    "diloco": (
        {"schedule": {"interval": H}},
        Recipe([ALL], H, False, 0, 1.0, "nesterov", 0.7, 0.9),
    ),
    "streaming_diloco": (
        {
            "schedule": {"interval": H},
            "fragments": {"num_fragments": 3},
            "delay": {"steps": 2, "alpha": 0.3},
        },
        Recipe(
            [LAYERS[0] + LAYERS[3], LAYERS[1], LAYERS[2]], H, True, 2, 0.3, "nesterov", 0.4, 0.9
        ),
    ),
}


class TinyNet(nn.Module):
    """Four square layers with tanh between them; returns the loss when given targets."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if y is None else F.mse_loss(x.float(), y.float())


def batch(cluster: int, step: int, part: int = 0, size: int = 3) -> tuple[Tensor, Tensor]:
    """The batch of one cluster at one inner step (from 1); `part` is a micro-batch of it."""
    generator = torch.Generator().manual_seed(1000 * cluster + 10 * step + part)
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.tanh(x.roll(1, dims=1) * 1.5)


def mean_loss(model: nn.Module, cluster: int, step: int, parts: int = 1) -> Tensor:
    """The mean of the losses of all parts of a step's batch: what data parallel computes."""
    return sum(model(*batch(cluster, step, part)) for part in range(parts)) / parts
