"""Every preset over shapes, fragment counts, H, tau and C, drawn by hypothesis."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsx.config.schema import preset
from dsx.method.choices import PRESETS
from tests.reference import Recipe, train_reference
from tests.reference_schedules import Adaptive
from tests.simulated import Simulated

BY_LAYER = ("streaming_diloco", "cocodc", "dilocox")
OTHERWISE = (  # by the last test, or each by its own reference in test_conformance.py
    "dreamddp", "eager_fp4", "plsgd_enp", "overlap_local_sgd", "cocktail_sgd", "recommended",
)  # fmt: skip


class Uneven(nn.Module):
    """Layers of any widths, one after the other, some of a single element."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = zip(widths, widths[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss(model: Any, cluster: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * cluster + step)
    x = torch.randn(2, model.layers[0].in_features, generator=generator)
    return (model(x) - 0.3 * (cluster + 1)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@st.composite
def drawn_methods(draw: st.DrawFn) -> tuple[str, dict[str, Any], Recipe, list[int], int]:
    """A preset's overrides, the same as a recipe, the layers' widths, and C."""
    name = draw(st.sampled_from([n for n in PRESETS if n not in OTHERWISE]))
    num_layers = draw(st.integers(2, 4))
    widths = draw(st.lists(st.integers(1, 5), min_size=num_layers + 1, max_size=num_layers + 1))
    layers = [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(num_layers)]
    interval = draw(st.integers(2, 6))
    count = draw(st.integers(1, min(num_layers, interval)))
    tau = draw(st.integers(1 if name == "cocodc" else 0, interval - 1))
    strided = [sum((layers[i] for i in range(p, num_layers, count)), []) for p in range(count)]
    runs: list[list[str]] = [[] for _ in range(count)]
    for i, names in enumerate(layers):
        runs[i * count // num_layers] += names
    everything = [sum(layers, [])]
    axes: dict[str, Any] = {"schedule": {"interval": interval}}
    if name in BY_LAYER:
        axes["fragments"] = {"num_fragments": count}
    common = {"eta": 0.3, "mu": 0.5}
    if name != "local_sgd":
        axes["outer_optimizer"] = {"lr": 0.3, "momentum": 0.5}
    recipes = {
        "local_sgd": Recipe(everything, interval, False, 0, 1.0, "sgd", 1.0),
        "slowmo": Recipe(everything, interval, False, 0, 1.0, "momentum", **common),
        "diloco": Recipe(everything, interval, False, 0, 1.0, "nesterov", **common),
        "opendiloco": Recipe(everything, interval, False, 0, 1.0, "nesterov", **common),
        "streaming_diloco": Recipe(strided, interval, True, tau, 0.4, "nesterov", **common),
        "cocodc": Recipe(
            strided, interval, False, tau, 1.0, "nesterov", **common,
            delay="compensation", lam=50.0, adaptive=Adaptive(1.0, 1.0, 0.6),
        ),
        "diloco_delayed": Recipe(
            everything, interval, False, 0, 1.0, "nesterov", **common, delay="delayed"
        ),
        "eager": Recipe(everything, interval, False, 0, 1.0, "nesterov", **common, delay="eager"),
        "eager_2": Recipe(
            everything, interval, False, 0, 1.0, "nesterov", **common, delay="eager", outer_steps=2
        ),
        "dilocox": Recipe(runs, interval, False, 0, 1.0, "nesterov", **common, delay="delayed"),
        "co2": Recipe(
            everything, interval, False, 0, 1.0, "momentum", **common,
            delay="delayed", penalty="tensor",
        ),
    }  # fmt: skip
    if name == "streaming_diloco":
        axes["delay"] = {"steps": tau, "alpha": 0.4}
    if name == "cocodc":
        axes["schedule"] |= {"gamma": 1.0, "step_seconds": 1.0, "transfer_seconds": 0.6}
        axes["delay"] = {"steps": tau, "strength": 50.0}
    if name in ("dilocox", "opendiloco"):
        axes["compression"] = {"type": "dense"}
    if name == "dilocox":
        axes["control"] = {"rank": 2, "min_rank": 1, "max_rank": 4, "min_interval": count,
                           "step_seconds": 1.0, "round_seconds": interval / 1.15}  # fmt: skip
    num_clusters = draw(st.integers(1, 5))
    return name, axes, recipes[name], widths, num_clusters


Drawn = tuple[str, dict[str, Any], Recipe, list[int], int]


@settings(max_examples=30, derandomize=True)
@given(drawn_methods())
def test_equals_the_reference(drawn: Drawn) -> None:
    compare_with_the_reference(drawn)


@pytest.mark.ci
@settings(max_examples=150, derandomize=True)
@given(drawn_methods())
def test_more_equal_the_reference(drawn: Drawn) -> None:
    compare_with_the_reference(drawn)


def compare_with_the_reference(drawn: Drawn) -> None:
    name, axes, recipe, widths, num_clusters = drawn
    method = preset(name, num_clusters, **axes)
    model = Uneven(widths)
    num_steps = 3 * recipe.interval + 2
    run = Simulated(copy.deepcopy(model), sgd, method, num_clusters)
    for _ in range(num_steps):
        run.train_step(loss)
    expected, anchor = train_reference(model, sgd, loss, recipe, num_clusters, num_steps)
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-5)
    for fragment, names in enumerate(recipe.fragments):
        flat = torch.cat([anchor[n].reshape(-1) for n in names])
        ours_flat = run.loops[0].state.anchor[fragment]
        torch.testing.assert_close(ours_flat, flat, rtol=1e-5, atol=1e-5)
        for loop in run.loops[1:]:
            assert torch.equal(loop.state.anchor[fragment], ours_flat)


@settings(max_examples=20, derandomize=True)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(["before", "after"]),
    st.data(),
)
def test_dreamddp_equals_the_reference(
    num_layers: int, interval: int, num_clusters: int, when: str, data: st.DataObject
) -> None:
    seconds = st.lists(st.integers(0, 4), min_size=num_layers, max_size=num_layers)
    backward, transfer = data.draw(seconds), data.draw(seconds)
    method = preset(
        "dreamddp",
        num_clusters,
        schedule={
            "interval": interval, "when": when,
            "backward_seconds": backward, "transfer_seconds": transfer,
        },
    )  # fmt: skip
    model = Uneven([3, 2, 4, 1, 3][: num_layers + 1])
    run = Simulated(copy.deepcopy(model), sgd, method, num_clusters)
    table = run.loops[0].history.plan["table"]
    assert {p for row in table for p in row} == set(range(num_layers))
    for _ in range(2 * interval + 1):
        run.train_step(loss)
    layers = [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(num_layers)]
    recipe = Recipe(
        layers, interval, False, 0, 1.0, "none", 0.0, delay="average", when=when, table=table
    )
    expected, _ = train_reference(model, sgd, loss, recipe, num_clusters, 2 * interval + 1)
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-5)
