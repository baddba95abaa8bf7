"""What must hold between methods, and that each stabiliser does something."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dsx.config.schema import preset
from dsx.core.types import SyncView
from dsx.method.delay.delay_compensation import DelayCompensation
from dsx.method.method import SettingWarning
from dsx.method.outer_optimizer import SGD
from tests.levels import by_default
from tests.reference import Recipe, train_reference
from tests.simulated import Simulated
from tests.tiny import ALL, ALL_CASES, TinyNet, mean_loss

NUM_STEPS = 15
EVERY_4 = {"interval": 4}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(name: str, num_clusters: int = 3, **overrides: Any) -> list[dict[str, Tensor]]:
    run = Simulated(TinyNet(), adamw, preset(name, num_clusters, **overrides), num_clusters)
    for _ in range(NUM_STEPS):
        run.train_step(mean_loss)
    return run.parameters()


def alone() -> dict[str, Tensor]:
    model = TinyNet()
    optimizer = adamw(model)
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        mean_loss(model, 0, step).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def largest_difference(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> float:
    return max((x[n] - y[n]).abs().max().item() for x, y in zip(a, b, strict=True) for n in x)


@pytest.mark.parametrize(
    ("mode", "strength"),
    [
        ("constant", 0.0),
        ("constant", 0.5),
        ("constant", 1e6),
        ("dc_asgd", 1.0),
        ("scale_free", 0.5),
    ],
)
def test_compensation_leaves_a_single_cluster_alone(mode: str, strength: float) -> None:
    """C = 1 and sgd(1): the anchor is what was sent, and eq. 8 must descend (+ would undo)."""
    (ours,) = trained(
        "cocodc",
        1,
        schedule={"type": "streaming", **EVERY_4},
        delay={"steps": 2, "strength": strength, "mode": mode},
        outer_optimizer={"type": "sgd", "lr": 1.0},
    )
    for name, value in alone().items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


def test_compensation_acts_at_a_strength_that_matters_and_not_at_the_papers() -> None:
    """The paper's 0.5 multiplies g*g: nothing in fp32; at 1e6 the model moves elsewhere."""

    def run(strength: float) -> list[dict[str, Tensor]]:
        schedule = {"type": "streaming", **EVERY_4}
        return trained("cocodc", schedule=schedule, delay={"steps": 2, "strength": strength})

    assert largest_difference(run(0.0), run(0.5)) < 1e-5
    assert largest_difference(run(0.0), run(1e4)) > 1e-3


@pytest.mark.parametrize("interval", [100, 40])
def test_compensation_divides_by_the_steps_that_the_difference_was_made_in(interval: int) -> None:
    """Eq. 7 by hand, in float64: a fragment sent 40 steps after its launch before, and 100."""
    local, sent, anchor = (torch.tensor([x]) for x in (1.0, 1.5, 0.5))
    view = cast(SyncView, SimpleNamespace(
        local=local, kept=sent, anchor=anchor, age=5, interval=interval, report={}
    ))  # fmt: skip
    merged = DelayCompensation(5, strength=3.0).merge(view)
    g = (1.5 - 1.0) / 5
    expected = 0.5 - 5 * (g + 3.0 * g * g * (0.5 - 1.5) / interval)
    assert merged.item() == pytest.approx(expected, abs=1e-7)


def test_an_adaptive_round_is_shorter_than_the_period() -> None:
    """What the compensation divides by is not H there: N = 8 transfers of 4 fragments in H."""
    link = {"step_seconds": 1.0, "transfer_seconds": 5.0, "gamma": 1.0}
    method = preset("cocodc", 2, schedule={"interval": 40, **link}, delay={"steps": 2})
    run = Simulated(TinyNet(), adamw, method, 2)
    launches: dict[int, list[int]] = {p: [0] for p in range(4)}
    for step in range(1, 121):
        run.train_step(mean_loss)
        history = run.loops[0].history
        for p, own in launches.items():
            if history.launched[p] == step:
                own.append(step)
            if history.applied[p] == step:
                assert history.intervals[p] == own[-1] - own[-2]
    assert sum(len(own) - 1 for own in launches.values()) > 20  # 12 in rounds of H
    assert min(run.loops[0].history.intervals) < 40


def test_the_record_of_a_sync_carries_the_size_of_the_correction() -> None:
    case = ALL_CASES["compensation, scale free"]
    run = Simulated(TinyNet(), adamw, case.method(), 2)
    events: list[Any] = []
    run.loops[0]._on_sync = events.append
    for _ in range(NUM_STEPS):
        run.train_step(mean_loss)
    ratios = [float(e["correction_norm"]) / float(e["descent_norm"]) for e in events]
    assert all(0 < ratio <= 1.0 + 1e-6 for ratio in ratios)  # the correction is clamped to |g|


def test_eager_with_one_cluster_is_diloco() -> None:
    """All of the mean is one's own: nothing is late."""
    outer = {"lr": 0.3, "momentum": 0.9}
    eager = trained("eager", 1, schedule=EVERY_4, outer_optimizer=outer)
    diloco = trained("diloco", 1, schedule=EVERY_4, outer_optimizer=outer)
    assert largest_difference(eager, diloco) < 1e-6


@pytest.mark.parametrize("rule", by_default(["sgd", "momentum", "nesterov"], "nesterov"))
@pytest.mark.parametrize("outer_steps", by_default([1, 2], 2))
def test_eager_equals_the_papers_form_in_fp64_terms(rule: str, outer_steps: int) -> None:
    """The paper's own anchors (tests/reference.py) against the shared one, over many rounds."""
    outer: dict[str, Any] = {"type": rule, "lr": 0.1}
    if rule != "sgd":
        outer["momentum"] = 0.8
    method = preset("eager", 4, schedule={"interval": 1}, outer_optimizer=outer,
                    delay={"outer_steps": outer_steps})  # fmt: skip
    run = Simulated(TinyNet(), adamw, method, 4)
    for _ in range(60):
        run.train_step(mean_loss)
    recipe = Recipe([ALL], 1, False, 0, 1.0, rule, 0.1, outer.get("momentum", 0.0), delay="eager",
                    outer_steps=outer_steps)  # fmt: skip
    expected, _ = train_reference(TinyNet(), adamw, mean_loss, recipe, 4, 60)
    assert largest_difference(run.parameters(), expected) < 2e-5


def test_delayed_is_diloco_one_round_late_where_gradients_do_not_depend_on_the_model() -> None:
    def slope(model: Any, cluster: int, step: int) -> Tensor:
        return sum(((cluster + 1) * p.sum() for p in model.parameters()), torch.zeros(()))

    def anchors(name: str) -> list[Tensor]:
        sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.01)  # noqa: E731
        outer = {"lr": 0.2, "momentum": 0.9}
        method = preset(name, schedule=EVERY_4, outer_optimizer=outer)
        run = Simulated(TinyNet(), sgd, method, 2)
        seen = []
        for _ in range(20):
            run.train_step(slope)
            seen.append(run.loops[0].state.anchor[0].clone())
        return seen

    late, prompt = anchors("diloco_delayed"), anchors("diloco")
    for step in range(4, 20):
        torch.testing.assert_close(late[step], prompt[step - 4], rtol=0, atol=1e-5)


def test_layerwise_averaging_in_every_step_after_the_update_is_local_sgd() -> None:
    """All layers, H = 1, sent after their own step inside the backward: plain averaging."""
    schedule = {
        "interval": 1, "when": "after",
        "backward_seconds": [1.0] * 4, "transfer_seconds": [1.0] * 4,
    }  # fmt: skip
    ours = trained("dreamddp", schedule=schedule)
    theirs = trained("local_sgd", schedule={"interval": 1})
    assert largest_difference(ours, theirs) < 1e-5
    first, *others = ours
    assert all(torch.equal(first[n], other[n]) for other in others for n in first)


@pytest.mark.parametrize("granularity", ["tensor", "element"])
def test_the_penalty_changes_the_result(granularity: str) -> None:
    """The paper's official code computes a constant in its place."""
    plain = trained("co2", schedule=EVERY_4, staleness={"type": "none"})
    penalised = trained("co2", schedule=EVERY_4, staleness={"granularity": granularity})
    assert largest_difference(plain, penalised) > 1e-3


def test_the_clip_changes_the_result() -> None:
    """The paper's official code drops the clamped value."""
    plain = trained("co2", schedule=EVERY_4)
    clipped = trained("co2", schedule=EVERY_4, outer_optimizer={"clip": 0.5, "clip_unit": "rms"})
    assert largest_difference(plain, clipped) > 1e-4


def test_co2s_own_clip_leaves_a_healthy_run_alone() -> None:
    """To the bit: no element of its momentum comes near the threshold."""
    clipped = trained("co2", schedule=EVERY_4)
    plain = trained("co2", schedule=EVERY_4, outer_optimizer={"clip": None})
    assert largest_difference(clipped, plain) == 0


def test_co2s_own_clip_bounds_what_an_outlier_does_to_the_anchor() -> None:
    moved = dict[bool, float]()
    for is_clipped in (True, False):
        overrides = {} if is_clipped else {"outer_optimizer": {"clip": None}}
        method = preset("co2", schedule=EVERY_4, **overrides)
        method = replace(method, max_norm_ratio=None)  # so that the outlier counts
        run = Simulated(TinyNet(), adamw, method, 2)
        steps = list[float]()
        for step in range(1, 17):
            before = run.loops[0].state.anchor[0].clone()
            if step == 6:
                with torch.no_grad():
                    next(run.models[1].parameters()).view(-1)[0] = 1e4
            run.train_step(mean_loss)
            steps.append(float((run.loops[0].state.anchor[0] - before).abs().max()))
        moved[is_clipped] = max(steps)
    assert moved[True] == pytest.approx(0.5)  # lr 0.5 times the threshold 1.0
    assert moved[False] > 1e3


def test_a_penalty_on_a_model_that_stands_still_is_none() -> None:
    """0 / 0 gives L = 1, and everything stays finite."""
    method = preset("co2", schedule={"interval": 2})
    run = Simulated(TinyNet(), lambda m: torch.optim.SGD(m.parameters(), lr=0.0), method, 2)
    before = copy.deepcopy(run.parameters())
    for _ in range(8):
        run.train_step(mean_loss)
    assert largest_difference(before, run.parameters()) == 0


@pytest.mark.filterwarnings("ignore::dsx.SettingWarning")
def test_nothing_is_lost_when_a_delayed_run_is_drained() -> None:
    """After the drain the anchor has seen every launched pseudo-gradient."""
    for name in ("diloco_delayed", "eager", "dilocox"):
        overrides: dict[str, Any] = {"outer_optimizer": {"type": "sgd", "lr": 1.0}}
        if name == "dilocox":
            overrides |= {"control": {"type": "fixed"}, "fragments": {"num_fragments": 2}}
            overrides["compression"] = {"type": "dense"}
        method = preset(name, schedule=EVERY_4, **overrides)
        assert method.outer_optimizer == SGD(1.0)
        run = Simulated(TinyNet(), adamw, method, 2)
        sent: dict[int, list[Tensor]] = {}
        for step in range(1, 13):
            run.train_step(mean_loss)
            for loop in run.loops:
                for t in loop.in_flight:
                    if getattr(t, "launched", 0) == step:
                        sent.setdefault(t.fragment, []).append(t.buffers.wire.clone())
        start = Simulated(TinyNet(), adamw, method, 2).loops[0].state.anchor
        run.finish()
        for p, anchor in enumerate(run.loops[0].state.anchor):
            total = sum(sent[p]) / 2  # every cluster's wire holds the mean once it has arrived
            torch.testing.assert_close(start[p] - anchor, total, rtol=0, atol=1e-6)


FEEDBACK = {"error_feedback": "fp32"}
CODECS: dict[str, dict[str, Any]] = {
    "dense": {"type": "dense"},
    "int4": {"type": "quantized", "wire": "int4", **FEEDBACK},
    "top-k": {"type": "top_k", "k": 16, "chunk": 64, "feedback_decay": 1.0},
    "low rank": {"type": "low_rank", "rank": 4, "factor_wire": "fp32", **FEEDBACK},
}


@pytest.mark.filterwarnings("ignore::dsx.SettingWarning")
@pytest.mark.parametrize(
    ("name", "codec"),
    [(n, c) for n in ("diloco", "diloco_delayed", "cocodc", "eager") for c in CODECS][:-1],
)  # eager goes with all but the last
def test_no_step_is_lost_by_a_finish_in_the_middle(name: str, codec: str) -> None:
    """Every step moves the weights by the same; what a codec still owes is in its residuals."""
    model = torch.nn.Linear(32, 32, bias=False)
    torch.nn.init.zeros_(model.weight)
    slope = torch.linspace(0.5, 1.5, 32).outer(torch.linspace(-1.0, 1.0, 32))
    overrides: dict[str, Any] = {"compression": CODECS[codec], "schedule": {"interval": 10}}
    if name == "cocodc":
        overrides["schedule"] = {"interval": 10, "step_seconds": 1.0, "transfer_seconds": 1.0}
        overrides |= {"fragments": {"num_fragments": 1}, "delay": {"steps": 4, "strength": 0.0}}
    method = preset(name, outer_optimizer={"type": "sgd", "lr": 1.0}, **overrides)
    run = Simulated(model, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), method, 2)
    for step in range(1, 101):
        run.train_step(lambda model, cluster, step: -(slope * model.weight).sum())
        if step in (22, 59):
            run.finish()
    run.finish()
    owed = torch.zeros(32 * 32)
    for loop in run.loops:
        for error in loop.state.channels[0].codec.errors.values():
            share = 1.0 if error.is_of_mean else 0.5
            owed[error.start : error.stop] += share * error.residual.read()
    with run.averaged() as averaged:
        expected = 100 * slope + owed.view(32, 32)
        torch.testing.assert_close(averaged.weight.detach(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "overrides", "num_clusters", "num_steps", "said"),
    [
        ("diloco_delayed", {"outer_optimizer": {"lr": 0.7}}, 2, None, r"lr=0.7 .* use lr <= 0.203"),
        ("eager", {"outer_optimizer": {"lr": 0.4}}, 8, None, r"lr=0.4 .* 0.8 of 0.32"),
        ("diloco", {"outer_optimizer": {"lr": 1.2}}, 2, None, r"lr=1.2 .* 0.8 of 1.36"),
        ("co2", {"outer_optimizer": {"lr": 0.9}}, 2, None, r"lr=0.9 with momentum"),
        ("diloco", {}, 2, 2000, r"20 rounds: momentum 0.9 needs 100 or more"),
    ],
)
def test_what_is_known_to_train_badly_is_warned_of(
    name: str, overrides: dict[str, Any], num_clusters: int, num_steps: int | None, said: str
) -> None:
    method = preset(name, **overrides)
    with pytest.warns(SettingWarning, match=said):
        method.validate(num_clusters=num_clusters, num_steps=num_steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.validate()
