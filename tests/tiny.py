"""A model of a few hundred parameters, its data, and every method on it, for all tests.

`CASES` is the conformance table: a new preset joins every test of tests/method/test_conformance.py,
tests/comm and tests/golden by one line here. `VARIANTS` are further combinations of axes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsx.config.schema import preset, resolve_method
from dsx.method.method import Method
from tests.reference import Recipe
from tests.reference_rounding import kept_momentum
from tests.reference_schedules import Adaptive

WIDTH = 6
NUM_LAYERS = 4
LAYERS = [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(NUM_LAYERS)]
ALL = [name for layer in LAYERS for name in layer]
STRIDED = [LAYERS[0] + LAYERS[3], LAYERS[1], LAYERS[2]]  # three fragments
HALVES = [LAYERS[0] + LAYERS[1], LAYERS[2] + LAYERS[3]]  # two, sequential
H = 4
EVERY_H = {"interval": H}
# DreamDDP: layers 3, 2, 1 find room behind the backward; one transfer takes one layer's backward
BACKWARD, TRANSFER = [1.0] * NUM_LAYERS, [1.0] * NUM_LAYERS
TABLE = [(3, 2, 1, 0), (3, 2, 1), (3, 2, 1)]
LINK = {"step_seconds": 1.0, "transfer_seconds": 1.0}


class Case(NamedTuple):
    """A preset with overrides, the same in the papers' symbols, and what it keeps.

    `vectors` counts fp32 values per parameter that outer state takes: anchor, slots, and a wire
    buffer and what is kept for every transfer under way. `atol` is how far from the
    reference it may be: where it rounds, a last bit may decide which way.
    """

    preset: str
    overrides: dict[str, Any]
    recipe: Recipe
    vectors: float
    atol: float = 2e-6

    def method(self, num_clusters: int = 2) -> Method:
        return preset(self.preset, num_clusters, **self.overrides)

    def axes(self) -> dict[str, Any]:
        return resolve_method(self.preset, self.overrides)[1]


CASES: dict[str, Case] = {
    "local_sgd": Case(
        "local_sgd", {"schedule": EVERY_H}, Recipe([ALL], H, False, 0, 1.0, "sgd", 1.0), 2
    ),
    "slowmo": Case(
        "slowmo",
        {"schedule": EVERY_H, "outer_optimizer": {"lr": 0.9, "momentum": 0.5}},
        Recipe([ALL], H, False, 0, 1.0, "momentum", 0.9, 0.5),
        3,
    ),
    "diloco": Case(
        "diloco", {"schedule": EVERY_H}, Recipe([ALL], H, False, 0, 1.0, "nesterov", 0.7, 0.9), 3
    ),
    "opendiloco": Case(
        "opendiloco",
        {"schedule": EVERY_H, "compression": {"type": "dense"}},  # fp16 is in tests/compress
        Recipe([ALL], H, False, 0, 1.0, "nesterov", 0.7, 0.9),
        3,
    ),
    "streaming_diloco": Case(
        "streaming_diloco",
        {
            "schedule": EVERY_H,
            "fragments": {"num_fragments": 3},
            "delay": {"steps": 2, "alpha": 0.3},
        },
        Recipe(STRIDED, H, True, 2, 0.3, "nesterov", 0.4, 0.9),
        3,
    ),
    "cocodc": Case(
        "cocodc",
        {
            "schedule": {"interval": 6, "gamma": 0.7, **LINK},
            "fragments": {"num_fragments": 3},
            "delay": {"steps": 1, "strength": 200.0},
        },
        Recipe(
            STRIDED, 6, False, 1, 1.0, "nesterov", 0.4, 0.9,
            delay="compensation", lam=200.0, adaptive=Adaptive(0.7, 1.0, 1.0),
        ),
        4,
    ),
    "diloco_delayed": Case(
        "diloco_delayed",
        {"schedule": EVERY_H},
        Recipe([ALL], H, False, 0, 1.0, "nesterov", 0.2, 0.9, delay="delayed"),
        4,
    ),
    "eager": Case(
        "eager",
        {"schedule": EVERY_H, "outer_optimizer": {"lr": 0.3}},
        Recipe([ALL], H, False, 0, 1.0, "nesterov", 0.3, 0.9, delay="eager"),
        8,
    ),
    "eager_2": Case(
        "eager_2",
        {"schedule": {"interval": 3}, "outer_optimizer": {"lr": 0.1}},
        Recipe([ALL], 3, False, 0, 1.0, "nesterov", 0.1, 0.9, delay="eager", outer_steps=2),
        10,
    ),
    "eager_fp4": Case(
        "eager_fp4",
        {
            "schedule": {"type": "streaming", **EVERY_H},  # as the paper has it
            "fragments": {"by": "layer", "num_fragments": 3},
            "compression": {"type": "dense"},  # its codes are in tests/method/test_eager_codes.py
            "outer_optimizer": {"type": "momentum", "lr": 0.3, "momentum": 0.5},
        },
        Recipe(STRIDED, H, True, 0, 1.0, "momentum", 0.3, 0.5, delay="eager"),
        8,
    ),
    "dilocox": Case(
        "dilocox",
        {
            "schedule": EVERY_H,
            "fragments": {"num_fragments": 2},
            "compression": {"type": "dense"},  # its codecs are tested in tests/compress
            "control": {
                "rank": 4, "max_rank": 6, "min_interval": 2,
                "step_seconds": 1.0, "round_seconds": 3.0,
            },
        },
        Recipe(HALVES, H, False, 0, 1.0, "nesterov", 0.2, 0.9, delay="delayed"),
        4,
    ),
    "co2": Case(
        "co2",
        {"schedule": EVERY_H},
        Recipe(
            [ALL], H, False, 0, 1.0, "momentum", 0.5, 0.2,
            delay="delayed", penalty="tensor", clip=1.0,
        ),
        4,
    ),
    "dreamddp": Case(
        "dreamddp",
        {
            "schedule": {
                "interval": 3, "backward_seconds": BACKWARD, "transfer_seconds": TRANSFER,
            }
        },
        Recipe(LAYERS, 3, False, 0, 1.0, "none", 0.0, delay="average", when="before", table=TABLE),
        2,
    ),
    "plsgd_enp": Case(
        "plsgd_enp",
        {"schedule": {"interval": 3}},
        Recipe(
            LAYERS, 3, False, 0, 1.0, "none", 0.0,
            delay="average", when="before", table=[(3,), (2,), (1, 0)],
        ),
        2,
    ),
    "overlap_local_sgd": Case(
        "overlap_local_sgd",
        {"schedule": EVERY_H},
        Recipe([ALL], H, False, 0, 0.6, "momentum", 1.0, 0.7, delay="pullback"),
        5,
    ),
    "cocktail_sgd": Case(
        "cocktail_sgd",
        {"compression": {"type": "dense"}},  # with its codec in test_cocktail_sgd
        Recipe([ALL], 1, False, 0, 1.0, "sgd", 1.0, delay="shift"),
        6,
    ),
    "recommended": Case(
        "recommended",
        {
            "schedule": EVERY_H,
            "fragments": {"num_fragments": 3},
            "delay": {"steps": 3},  # "auto" is in tests/outer/test_overlap.py
            "compression": {"type": "dense"},  # its codes are in tests/method/test_two_legs.py
        },
        Recipe(STRIDED, H, True, 3, 1.0, "nesterov", 1.0, 0.5, delay="shift", outer_steps=0),
        4,
    ),
}  # fmt: skip

_THREE = {"by": "layer", "num_fragments": 3}
_STREAM = {"schedule": {"type": "streaming", **EVERY_H}, "fragments": _THREE}
_ADAPTIVE = {"type": "adaptive", "interval": 6, "gamma": 0.7, **LINK}

VARIANTS: dict[str, Case] = {
    "delayed, first round local": Case(
        "diloco_delayed",
        {"schedule": EVERY_H, "delay": {"first_round": "local"}},
        Recipe([ALL], H, False, 0, 1.0, "nesterov", 0.2, 0.9, delay="delayed", first_round="local"),
        5,
    ),
    "eager, sgd": Case(
        "eager",
        {"schedule": EVERY_H, "outer_optimizer": {"type": "sgd", "lr": 0.7}},
        Recipe([ALL], H, False, 0, 1.0, "sgd", 0.7, delay="eager"),
        6,
    ),
    "eager, adaptive transmission": Case(
        "eager",
        {"schedule": _ADAPTIVE, "fragments": _THREE, "outer_optimizer": {"lr": 0.3}},
        Recipe(
            STRIDED, 6, False, 0, 1.0, "nesterov", 0.3, 0.9,
            delay="eager", adaptive=Adaptive(0.7, 1.0, 1.0),
        ),
        8,
    ),
    "compensation, dc_asgd, streaming": Case(
        "streaming_diloco",
        {
            **_STREAM,
            "delay": {"type": "compensation", "steps": 2, "strength": 20.0, "mode": "dc_asgd"},
        },
        Recipe(
            STRIDED, H, True, 2, 1.0, "nesterov", 0.4, 0.9,
            delay="compensation", lam=20.0, mode="dc_asgd",
        ),
        4,
    ),
    "compensation, scale free": Case(
        "streaming_diloco",
        {**_STREAM, "delay": {"type": "compensation", "steps": 2, "mode": "scale_free"}},
        Recipe(
            STRIDED, H, True, 2, 1.0, "nesterov", 0.4, 0.9, delay="compensation", mode="scale_free"
        ),
        4,
    ),
    "co2, element, nesterov, clip": Case(
        "co2",
        {
            "schedule": EVERY_H,
            "staleness": {"granularity": "element"},
            "outer_optimizer": {"type": "nesterov", "lr": 0.2, "momentum": 0.5, "clip": 0.01},
        },
        Recipe(
            [ALL], H, False, 0, 1.0, "nesterov", 0.2, 0.5,
            delay="delayed", penalty="element", clip=0.01,
        ),
        4,  # and the first step, the last update, and a note as long for each transfer
    ),
    "co2's penalty on streaming fragments": Case(
        "streaming_diloco",
        {**_STREAM, "delay": {"steps": 2, "alpha": 0.3}, "staleness": {"type": "gap"}},
        Recipe(STRIDED, H, True, 2, 0.3, "nesterov", 0.4, 0.9, penalty="tensor"),
        4,
    ),
    "diloco, clip": Case(
        "diloco",
        {"schedule": EVERY_H, "outer_optimizer": {"clip": 0.02}},
        Recipe([ALL], H, False, 0, 1.0, "nesterov", 0.7, 0.9, clip=0.02),
        3,
    ),
    "streaming, momentum in bf16": Case(
        "streaming_diloco",
        {
            **_STREAM,
            "delay": {"steps": 2, "alpha": 0.3},
            "outer_optimizer": {"state_dtype": "bf16"},
        },
        Recipe(STRIDED, H, True, 2, 0.3, "nesterov", 0.4, 0.9, kept=kept_momentum),
        2.5,
        atol=1e-3,
    ),
    "cocodc without compensation": Case(
        "cocodc",
        {
            "schedule": {"interval": 6, "gamma": 0.7, **LINK},
            "fragments": {"num_fragments": 3},
            "delay": {"type": "streaming", "steps": 1, "alpha": 0.6},
        },
        Recipe(
            STRIDED, 6, False, 1, 0.6, "nesterov", 0.4, 0.9, adaptive=Adaptive(0.7, 1.0, 1.0)
        ),
        3,
    ),
    "dreamddp, after": Case(
        "dreamddp",
        {
            "schedule": {
                "interval": 3, "backward_seconds": BACKWARD, "transfer_seconds": TRANSFER,
                "when": "after",
            }
        },
        Recipe(LAYERS, 3, False, 0, 1.0, "none", 0.0, delay="average", when="after", table=TABLE),
        1,
    ),
    "dilocox, H falls from 4 to 2": Case(
        "dilocox",
        {
            "schedule": EVERY_H,
            "fragments": {"num_fragments": 2},
            "compression": {"type": "dense"},
            "control": {
                "rank": 4, "max_rank": 6, "min_interval": 2, "window": 2,
                "step_seconds": 1.0, "round_seconds": 1.0,
            },
        },
        Recipe(HALVES, H, False, 0, 1.0, "nesterov", 0.2, 0.9, delay="delayed", moves=(4, 2)),
        4,
    ),
    "pullback to the plain mean, streaming": Case(
        "overlap_local_sgd",
        {**_STREAM, "delay": {"alpha": 0.3}, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
        Recipe(STRIDED, H, True, 0, 0.3, "momentum", 1.0, 0.0, delay="pullback"),
        4,
    ),
    "shift that waits, nesterov": Case(
        "cocktail_sgd",
        {
            "schedule": EVERY_H,
            "compression": {"type": "dense"},
            "delay": {"outer_steps": 0},
            "outer_optimizer": {"type": "nesterov", "lr": 0.7, "momentum": 0.9},
        },
        Recipe(
            [ALL], H, False, 0, 1.0, "nesterov", 0.7, 0.9, delay="shift", outer_steps=0
        ),
        4,
    ),
    "shift by a whole round, momentum": Case(
        "diloco",
        {
            "schedule": EVERY_H,
            "delay": {"type": "shift", "outer_steps": 1},
            "outer_optimizer": {"type": "momentum", "lr": 0.7, "momentum": 0.5},
        },
        Recipe([ALL], H, False, 0, 1.0, "momentum", 0.7, 0.5, delay="shift"),
        7,
    ),
    "averaging in fragments, overlapped": Case(
        "dreamddp",
        {**_STREAM, "delay": {"steps": 2}},
        Recipe(STRIDED, H, True, 2, 1.0, "none", 0.0, delay="average"),
        2,
    ),
}  # fmt: skip

ALL_CASES = {**CASES, **VARIANTS}


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
