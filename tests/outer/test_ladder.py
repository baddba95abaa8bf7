"""Steps down the ladder: which a method takes, and what is computed then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dsx
from dsx.config.files import ConfigError
from dsx.config.schema import load_config, preset
from dsx.method.method import Method
from dsx.method.outer_optimizer import OuterContext, OuterOptimizer
from tests.levels import by_default
from tests.outer.test_overlap import transfers_take  # noqa: F401 - a fixture
from tests.reference import Recipe, train_reference
from tests.simulated import Simulated
from tests.tiny import ALL, CASES, H, TinyNet, mean_loss

TOO_MUCH = {"type": "momentum", "lr": 40.0, "momentum": 0.1}  # a quarter is too much, too
TWO = {"by": "layer", "num_fragments": 2}
DELAYS: dict[str, dict[str, Any]] = {
    "shift": {"type": "shift", "steps": 1},
    "shift auto": {"type": "shift", "steps": "auto"},
    "streaming auto": {"type": "streaming", "steps": "auto", "alpha": 1.0},
    "compensation auto": {"type": "compensation", "steps": "auto"},
}
DOWN = ["gain", "gain", "interval", "blocking"]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4)  # small enough for any outer rate


def loss(model: torch.nn.Module, cluster: int, step: int) -> torch.Tensor:
    return mean_loss(model, cluster, 1)  # the same batch, so that means point the same way


def stepping(name: str, num_clusters: int = 2, **axes: Any) -> Method:
    method = preset(name, num_clusters, **{"outer_optimizer": TOO_MUCH, **axes})
    return replace(method, guard="step_down")


def overlapped(delay: str, interval: int = 4) -> Method:
    schedule = {"type": "streaming", "interval": interval}
    return stepping("diloco", schedule=schedule, fragments=TWO, delay=DELAYS[delay])


def started(method: Method, num_clusters: int = 2) -> Simulated:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dsx.SettingWarning)
        return Simulated(TinyNet(), sgd, method, num_clusters)


def train(run: Simulated, num_steps: int, look: Callable[[], None] = lambda: None) -> Simulated:
    while run.num_steps < num_steps:
        run.train_step(loss)
        look()
    return run


def rungs_of(run: Simulated) -> list[str]:
    """What all clusters have taken, alike."""
    first, *others = [loop.history for loop in run.loops]
    assert all(history == first for history in others)
    return first.guard.get("rungs", [])


@dataclass
class Halving:
    """Heavy ball whose rate is halved after so many rounds, as the oracle has it."""

    after: tuple[int, ...]
    calls: int = 0

    def __call__(self, buffer: torch.Tensor, gradient: torch.Tensor, recipe: Recipe) -> Any:
        rounds = self.calls // len(ALL)  # a call for each parameter
        self.calls += 1
        buffer.copy_(recipe.mu * buffer + gradient)
        return recipe.eta * 0.5 ** sum(rounds >= n for n in self.after) * buffer


@pytest.mark.parametrize(
    ("name", "rounds", "moves"),
    [("diloco", (7, 13), (19, 2)), ("diloco_delayed", (7, 13), (19, 2))],
)
def test_updates_are_those_of_a_plain_loop_with_a_lower_rate_and_a_shorter_h(
    name: str, rounds: tuple[int, ...], moves: tuple[int, int]
) -> None:
    """Figures from the second round on: an alarm in the sixth, known as all's in the seventh."""
    axes = {"schedule": {"interval": H}, "fragments": {"by": "model"}}
    run = started(stepping(name, **axes))
    train(run, 100)
    assert rungs_of(run) == DOWN[:3]
    recipe = Recipe(
        [ALL], H, False, 0, 1.0, Halving(rounds), 40.0, 0.1, moves=moves,
        delay="delayed" if "delayed" in name else "blend",
    )  # fmt: skip
    expected, anchor = train_reference(TinyNet(), sgd, loss, recipe, 2, 100)
    flat = torch.cat([anchor[n].reshape(-1) for n in ALL])
    torch.testing.assert_close(run.loops[0].state.anchor[0], flat, rtol=0, atol=2e-6)
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=2e-6)


def test_eager_looks_ahead_with_the_rate_that_is_in_force() -> None:
    """Anchors and look-aheads both have the new one, so nothing is lost or counted twice."""
    rule = {"type": "sgd", "lr": 0.8}
    run = started(stepping("eager", 2, schedule={"interval": H}, outer_optimizer=rule))
    models = [TinyNet() for _ in range(2)]
    shared = parameters_to_vector(models[0].parameters()).detach()
    starts, late = [shared.clone() for _ in range(2)], None
    for step in range(1, 29):
        if step == 14:
            for loop in run.loops:
                loop.history.guard["due"] = ["gain"]  # taken behind the period that ends at 16
        run.train_step(loss)
        for m, model in enumerate(models):
            loss(model, m, step).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 1e-4 * p.grad
                    p.grad = None
        if step % H:
            continue
        lr = 0.8 if step <= 16 else 0.4
        own = [start - parameters_to_vector(m.parameters()).detach()
               for start, m in zip(starts, models, strict=True)]  # fmt: skip
        shared = shared if late is None else shared - lr * late
        late = sum(own) / 2
        starts = [shared - lr * share / 2 for share in own]
        for start, model in zip(starts, models, strict=True):
            vector_to_parameters(start.clone(), model.parameters())
    assert rungs_of(run) == ["gain"]
    torch.testing.assert_close(run.loops[0].state.anchor[0], shared, rtol=0, atol=1e-6)
    for ours, theirs in zip(run.models, models, strict=True):
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)


LOW_RANK = {"type": "low_rank", "rank": 2, "error_feedback": "fp32", "dense_rounds": 0}
METHODS: dict[str, tuple[Callable[[], Method], list[str]]] = {
    **{name: (lambda name=name: overlapped(name, 8), DOWN) for name in DELAYS},
    "periodic, auto": (
        lambda: stepping("diloco", schedule={"interval": 8}, delay=DELAYS["shift auto"]), DOWN
    ),
    "eager": (lambda: stepping("eager", schedule={"interval": H}), DOWN[:3]),
    "pullback": (lambda: stepping("overlap_local_sgd", schedule={"interval": H}), DOWN[:3]),
    "odd H": (lambda: stepping("diloco", schedule={"interval": 5}), DOWN[:3]),
    "low rank": (
        lambda: stepping("diloco", schedule={"interval": H}, compression=LOW_RANK), DOWN[:3]
    ),
    "adaptive transmission": (
        lambda: stepping("cocodc", **{k: v for k, v in CASES["cocodc"].overrides.items()}), DOWN,
    ),
    "as many fragments as steps": (
        lambda: stepping("streaming_diloco", **CASES["streaming_diloco"].overrides),
        ["gain", "gain", "blocking"],
    ),
    "a controller moves H": (
        lambda: stepping("dilocox", **CASES["dilocox"].overrides), ["gain", "gain"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", by_default(METHODS, "shift auto", "periodic, auto", "eager"))
@pytest.mark.usefixtures("transfers_take")
def test_all_clusters_go_down_together_as_far_as_the_method_can(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Where tau follows from the line, this one is so slow that it is as large as it may be."""
    request.getfixturevalue("transfers_take").update({0: 100.0, 1: 100.0})
    make, expected = METHODS[name]
    run, events = started(make()), list[Any]()
    run.loops[0]._on_sync = events.append
    train(run, 240, lambda: rungs_of(run) and None)
    assert rungs_of(run) == expected == events[-1]["guard_rungs"]
    anchors = [loop.state.anchor for loop in run.loops]
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*anchors, strict=True))
    if "interval" in expected:
        assert events[-1]["interval"] == run.method.schedule.interval // 2
    if "blocking" in expected:
        assert events[-1]["applied_step"] == events[-1]["launched_step"]
    assert "guard_rungs" not in events[0]


def test_each_step_is_told_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    run = started(stepping("streaming_diloco", **CASES["streaming_diloco"].overrides))
    train(run, 200)
    told = [r.getMessage() for r in caplog.records if "step_down" in r.getMessage()]
    assert [t.split(": ", 1)[1].split(";")[0] for t in told] == [
        "outer_optimizer.lr is 20 from here on",
        "outer_optimizer.lr is 10 from here on",
        "means are applied at the boundary of their launch from here on",
    ]
    assert "no shorter H, as delay.steps=2 is not below half of it" in told[2]
    assert "another step is left" in told[1] and "no other step is left" in told[2]


class Fixed(OuterOptimizer):
    """A rule without a rate."""

    def validate(self) -> None:
        """Nothing to check."""

    def update(self, grad: torch.Tensor, slots: Any, context: OuterContext) -> torch.Tensor:
        """Return the mean."""
        return grad


def test_what_cannot_step_down_is_refused_by_name() -> None:
    block = {"clusters": {"num_clusters": 2}, "guard": {"action": "step_down"}}
    with pytest.raises(ConfigError, match=r"dsx.guard.action='step_down': this method averages"):
        load_config({"dsx": {"preset": "dreamddp", **block}})
    stepping_down = load_config({"dsx": {"preset": "diloco", **block}})
    assert stepping_down.method.guard == "step_down"
    assert stepping_down.common()["guard"] == {"action": "step_down"}  # to be the same everywhere
    method = replace(preset("diloco", 2, schedule={"interval": 1}), outer_optimizer=Fixed())
    method.validate()
    with pytest.raises(
        ValueError, match=r"no step to take \(no lower rate, as Fixed has no lr; no"
    ):
        replace(method, guard="step_down").validate()
