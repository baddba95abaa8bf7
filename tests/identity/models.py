"""The model, its data and the methods that both trees train. Nothing here imports dsx.

Measured times are given as constants wherever a method decides by them. The matrices are large
enough for codecs to take them, and of ragged sides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDES = (36, 33, 40, 35, 36)
LAST_STEP = 24
EVERY_4: dict[str, Any] = {"schedule": {"interval": 4}}
LINK = {"step_seconds": 1.0, "transfer_seconds": 1.0}
THREE = {"num_fragments": 3}
LAYERWISE = {
    "interval": 3,
    "backward_seconds": [1.0] * (len(SIDES) - 1),
    "transfer_seconds": [1.0] * (len(SIDES) - 1),
}
ADAPTIVE_RANK = {
    "rank": 4, "min_rank": 2, "max_rank": 8, "min_interval": 2, "window": 1,
    "step_seconds": 1.0, "round_seconds": 3.0,
}  # fmt: skip


class Row(NamedTuple):
    """A preset with overrides, and the step at which it is stopped: what can be under way is."""

    preset: str
    overrides: dict[str, Any]
    stop: int = 13


STREAM = {**EVERY_4, "fragments": THREE, "delay": {"steps": 2, "alpha": 0.3}}
COCODC = {"schedule": {"interval": 6, "gamma": 0.7, **LINK}, "fragments": THREE}

PRESETS: dict[str, Row] = {
    "local_sgd": Row("local_sgd", EVERY_4),
    "slowmo": Row("slowmo", {**EVERY_4, "outer_optimizer": {"lr": 0.9, "momentum": 0.5}}),
    "diloco": Row("diloco", EVERY_4),
    "streaming_diloco": Row("streaming_diloco", STREAM),
    "cocodc": Row("cocodc", {**COCODC, "delay": {"steps": 1, "strength": 200.0}}, 14),
    "diloco_delayed": Row("diloco_delayed", EVERY_4),
    "eager": Row("eager", {**EVERY_4, "outer_optimizer": {"lr": 0.3}}),
    "dilocox": Row(
        "dilocox",
        {
            **EVERY_4,
            "fragments": {"num_fragments": 2},
            "compression": {"dense_rounds": 1},
            "control": ADAPTIVE_RANK,
        },
    ),
    "co2": Row("co2", EVERY_4),
    "dreamddp": Row("dreamddp", {"schedule": LAYERWISE}),
}

VARIANTS: dict[str, Row] = {
    "dilocox, dense": Row(
        "dilocox",
        {
            **EVERY_4,
            "fragments": {"num_fragments": 2},
            "compression": {"type": "dense"},
            "control": {**ADAPTIVE_RANK, "window": 2, "round_seconds": 1.0},
        },
    ),
    "streaming, int4, feedback": Row(
        "streaming_diloco",
        {
            **STREAM,
            "compression": {"type": "quantized", "wire": "int4", "error_feedback": "bf16"},
        },
    ),
    "diloco, stochastic int4": Row(
        "diloco",
        {
            **EVERY_4,
            "compression": {
                "type": "quantized", "rounding": "stochastic", "error_feedback": "int8",
            },
        },
    ),
    "delayed, low rank": Row(
        "diloco_delayed",
        {**EVERY_4, "compression": {"type": "low_rank", "rank": 4, "full_round_every": 3}},
    ),
    "eager, int4, feedback": Row(
        "eager", {**EVERY_4, "compression": {"type": "quantized", "error_feedback": "fp32"}}
    ),
    "cocodc, top-k": Row(
        "cocodc",
        {**COCODC, "delay": {"steps": 1}, "compression": {"type": "top_k", "k": 16, "chunk": 256}},
        14,
    ),
    "diloco, outer Adam": Row(
        "diloco", {**EVERY_4, "outer_optimizer": {"type": "adam", "lr": 0.01}}
    ),
    "delayed, first round local": Row(
        "diloco_delayed", {**EVERY_4, "delay": {"first_round": "local"}}, 6
    ),
    "eager, two outer steps": Row(
        "eager", {**EVERY_4, "delay": {"outer_steps": 2}, "outer_optimizer": {"lr": 0.1}}
    ),
    "compensation, dc_asgd, streaming": Row(
        "streaming_diloco",
        {
            **EVERY_4,
            "fragments": THREE,
            "delay": {"type": "compensation", "steps": 2, "strength": 20.0, "mode": "dc_asgd"},
        },
    ),
    "co2, element, nesterov, clip": Row(
        "co2",
        {
            **EVERY_4,
            "staleness": {"granularity": "element"},
            "outer_optimizer": {"type": "nesterov", "lr": 0.2, "momentum": 0.5, "clip": 0.01},
        },
    ),
    "cocodc without compensation": Row(
        "cocodc", {**COCODC, "delay": {"type": "blend", "steps": 1, "alpha": 0.6}}, 14
    ),
    "averaging in fragments, overlapped": Row(
        "dreamddp",
        {
            "schedule": {"type": "streaming", "interval": 4},
            "fragments": {"by": "layer", **THREE},
            "delay": {"steps": 2},
        },
    ),
}  # fmt: skip
WIRES = ("bf16", "fp16", "int8", "fp8", "fp4_e2m1", "fp4_e3m0", "ternary")
VARIANTS |= {
    f"diloco, {wire}": Row(
        "diloco", {**EVERY_4, "compression": {"type": "quantized", "wire": wire}}
    )
    for wire in WIRES
}

ROWS = {**PRESETS, **VARIANTS}


class Net(nn.Module):
    """Linear layers with tanh between them; returns the loss when given targets."""

    def __init__(self, seed: int = 0, sides: tuple[int, ...] = SIDES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sides, sides[1:], strict=False))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x.float(), y)


def batch(
    cluster: int, step: int, part: int = 0, sides: tuple[int, ...] = SIDES
) -> tuple[Tensor, Tensor]:
    """The batch of one cluster at one inner step, from 1; `part` is a piece of it."""
    generator = torch.Generator().manual_seed(10_000 * cluster + 100 * step + part)
    x = torch.randn(3, sides[0], generator=generator)
    return x, torch.tanh(x.roll(1, dims=1) * 1.5)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def block(row: Row, num_clusters: int, metrics: str | None, **more: Any) -> dict[str, Any]:
    """The "dsx" block of a row; `metrics` is where records go, if anywhere."""
    clusters = {"num_clusters": num_clusters, "deadline_seconds": 120}
    config = {"preset": row.preset, "clusters": clusters, "metrics": {"dir": metrics}}
    return {"dsx": {**config, **row.overrides, **more}}
