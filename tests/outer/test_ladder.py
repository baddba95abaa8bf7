"""Steps down the ladder: what is computed then, alike everywhere, and in a run that goes on."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.config.files import ConfigError
from dsx.config.schema import load_config, preset
from dsx.core.types import Stage
from dsx.method.ladder import Ladder
from dsx.method.method import Method
from dsx.method.outer_optimizer import OuterContext, OuterOptimizer
from tests.checkpoint.half_arrived import assert_same, resume, save_all
from tests.levels import by_default
from tests.method.test_control import StageOfTwo
from tests.outer.test_guard import over_gloo  # noqa: F401 - a fixture
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


@pytest.mark.usefixtures("over_gloo")
def test_over_gloo_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    method = overlapped("shift")
    on_threads = train(started(method), 120)
    monkeypatch.undo()
    in_process = train(started(method), 120)
    assert rungs_of(on_threads) == DOWN
    assert_same(on_threads, in_process)


@pytest.fixture(scope="module")
def whole() -> Simulated:
    return train(started(overlapped("shift")), 120)


@pytest.mark.parametrize("stop", by_default([23, 27, 28, 29, 30, 52, 53, 77, 93, 100], 28, 29, 93))
def test_a_run_that_is_stopped_goes_on_as_one_that_is_not(
    stop: int, whole: Simulated, tmp_path: Path
) -> None:
    first = train(started(whole.method), stop)
    save_all(first, tmp_path)
    second = started(whole.method)
    resume(second, first, tmp_path)
    assert_same(train(second, 120), whole)


def test_a_checkpoint_of_another_action_begins_at_the_top(tmp_path: Path) -> None:
    """And one that has stepped down goes on without, where it is not to."""
    warning = replace(overlapped("shift"), guard="warn")
    first = train(started(warning), 40)
    assert "rungs" not in first.loops[0].history.guard
    save_all(first, tmp_path / "a")
    second = started(overlapped("shift"))
    resume(second, first, tmp_path / "a")
    assert rungs_of(train(second, 60)) == DOWN[:1]
    save_all(second, tmp_path / "b")
    third, events = started(warning), list[Any]()
    resume(third, second, tmp_path / "b")
    third.loops[0]._on_sync = events.append
    train(third, 80)
    assert events[-1]["effective_gain"] > 40 and "guard_rungs" not in events[-1]


def nearly_too_much() -> Method:
    """5.9 where means point the same way: one that does not is enough for no alarm."""
    rule = {"type": "nesterov", "lr": 1.0, "momentum": 0.83}
    return stepping("diloco", 3, schedule={"interval": 2}, outer_optimizer=rule)


def turn_round(run: Simulated, cluster: int) -> None:
    """Let one cluster decode the next mean with its sign the other way."""
    codec = run.loops[cluster].state.channels[0].codec
    exchange = codec.exchange

    def turned(x: torch.Tensor, launch: Any) -> Any:
        codec.exchange = exchange  # type: ignore[method-assign]
        return (yield from exchange(x, launch)).neg_()

    codec.exchange = turned  # type: ignore[method-assign]


@pytest.mark.parametrize("at", [10, 12, 14])
def test_a_mean_that_one_cluster_decodes_differently_leads_nowhere(at: int) -> None:
    """Two would go down, and the third would not, or later: all wait until it is known."""
    run = train(started(nearly_too_much(), 3), at)
    turn_round(run, 2)
    seen: list[list[list[str]]] = []

    def look() -> None:
        seen.append([loop.history.guard.get("rungs", []) for loop in run.loops])
        if run.loops[0].totals.refused:
            rungs_of(run)  # of histories that are alike

    train(run, 40, look)
    assert {loop.totals.refused for loop in run.loops} == {1}
    assert all(rungs == at_once[0] for at_once in seen for rungs in at_once)
    assert rungs_of(run) == ["gain"]


def test_where_one_cluster_lacks_its_samples_the_rungs_stay_or_a_resume_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = overlapped("shift")
    first = train(started(method), 40)
    assert rungs_of(first) == ["gain"]
    save_all(first, tmp_path)
    for rungs in (["gain"], ["gain", "gain"]):
        second = started(method)
        guard = second.loops[1].guard
        begin_anew = guard.begin_anew
        monkeypatch.setattr(guard, "begin_anew", lambda f, sample, do=begin_anew: do(f, None))
        first.loops[1].history.guard["rungs"] = rungs
        save_all(first, tmp_path)
        if len(rungs) == 2:
            with pytest.raises(ValueError, match=r"different numbers of steps down \(1, 2\); resu"):
                resume(second, first, tmp_path)
        else:
            resume(second, first, tmp_path)
            assert rungs_of(train(second, 120)) == DOWN


def test_the_stages_of_a_pipeline_go_down_together() -> None:
    """What one has seen is told the other behind the end of a period; H stays where they shift."""
    method = overlapped("shift")
    shared, meeting = [torch.zeros(0)] * 2, threading.Barrier(2)
    taken: list[list[str]] = [[], []]

    def run(index: int) -> None:
        loop = started(method).loops[0]
        guard, history = loop.guard, loop.history
        guard.ladder = Ladder(method, 2, 2)
        adapter: Any = StageOfTwo(Stage(index, 2), shared, meeting)
        guard._adapter, guard._speaks = adapter, False
        for step in range(1, 60):
            history.step = step
            if step in (7, 12, 30, 50) and index == step % 2:
                history.guard["due"] = ["gain"]
            guard.settle(history)
            taken[index].append(str(history.guard.get("rungs", [])))

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(taken[0]) == 59 and taken[0] == taken[1]
    assert taken[0][6:8] == ["[]", "['gain']"] and taken[0][-1] == "['gain', 'gain', 'blocking']"


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
