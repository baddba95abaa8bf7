"""Clusters that have saved at different steps, or in the midst of a boundary, and meet again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsx.config.schema import preset
from dsx.engines import simulated
from dsx.outer.resuming import FragmentPlan, HandOver, Holding, plan_fragment
from dsx.outer.transfer import Transfer
from tests.checkpoint.half_arrived import (
    HoldingHub,
    advance,
    assert_same,
    catch_up,
    hold,
    lacking,
    resume,
    save_all,
)
from tests.checkpoint.test_half_arrived import CODECS, NUM_STEPS, new_run, whole_run
from tests.compress.test_over_gloo import WideNet, loss
from tests.simulated import Simulated


@pytest.fixture(autouse=True)
def _holding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "InProcessHub", HoldingHub)


@pytest.mark.parametrize("num_clusters", [2, pytest.param(4, marks=pytest.mark.ci)])
@pytest.mark.parametrize(
    ("name", "codec", "steps"),
    [
        ("one step", "int4, fp32", (5, 7)),
        ("blocking", "int4, fp32", (5, 6)),
        ("eager", "int4, fp32", (5, 7)),
        pytest.param("streaming", "top-k", (3, 5), marks=pytest.mark.ci),
        pytest.param("eager, two", "top-k", (5, 7), marks=pytest.mark.ci),
        *(pytest.param("one step", codec, (4, 8), marks=pytest.mark.ci) for codec in CODECS),
    ],
)
def test_one_that_is_ahead_is_met_where_the_other_gets_to(
    name: str, codec: str, steps: tuple[int, int], num_clusters: int, tmp_path: Path
) -> None:
    """It has launched what the other has not: the run is the one that was never stopped."""
    first, second = (new_run(name, codec, num_clusters) for _ in range(2))
    behind, ahead = steps
    for _ in range(behind):
        first.train_step(loss)
    hold(first, ())
    for _ in range(ahead - behind):
        advance(first, 1, loss)
    assert [loop.history.step for loop in first.loops][:2] == [behind, ahead]
    assert lacking(first)[1]
    save_all(first, tmp_path, keeps_last=True)
    resume(second, first, tmp_path)
    catch_up(second, loss)
    while second.num_steps < NUM_STEPS:
        second.train_step(loss)
    assert_same(second, whole_run(name, codec, num_clusters))
    for loop in second.loops:  # launches are counted from the beginning of the run
        numbers = [t.attempt.what.number for t in loop.in_flight if isinstance(t, Transfer)]
        assert not numbers or max(numbers) == sum(loop.history.launches)


def take_step(run: Simulated) -> None:
    """With an inner rate that falls from step to step, set behind the boundary."""
    run.train_step(loss)
    for optimizer in run.optimizers:
        optimizer.param_groups[0]["lr"] = 0.1 / (run.num_steps + 1)  # type: ignore[union-attr]


def test_a_boundary_is_ended_with_the_inner_rate_that_it_had(tmp_path: Path) -> None:
    rule = {"type": "momentum", "lr": 1.0, "momentum": 0.5, "scale_by_lr": True}
    method = preset("slowmo", 2, schedule={"interval": 3}, outer_optimizer=rule)
    whole, first, second = (
        Simulated(WideNet(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), method, 2)
        for _ in range(3)
    )
    for step in range(1, 9):
        take_step(whole)
        if step == 6:
            hold(first, (0, 1))
        if step <= 6:
            take_step(first)
    assert all(loop.deferral.is_deferred for loop in first.loops)
    save_all(first, tmp_path, keeps_last=True)
    resume(second, first, tmp_path)
    catch_up(second, loss)
    while second.num_steps < 8:
        take_step(second)
    assert_same(second, whole)


def test_steps_that_differ_are_refused_unless_a_run_was_told_to_end(tmp_path: Path) -> None:
    first, second = (new_run("one step", "dense", 2) for _ in range(2))
    for _ in range(4):
        first.train_step(loss)
    advance(first, 1, loss)
    save_all(first, tmp_path)
    with pytest.raises(ValueError, match=r"at different steps \(cluster 0: 4, cluster 1: 5\)"):
        resume(second, first, tmp_path)


def test_a_boundary_that_was_left_is_ended_before_the_next_step(tmp_path: Path) -> None:
    first = new_run("blocking", "dense", 2)
    for step in range(1, 4):
        if step == 3:
            hold(first, (0, 1))
        first.train_step(loss)
    with pytest.raises(RuntimeError, match="step 3 was left before what was due had been applied"):
        first.train_step(loss)


A = Holding(launched=5, arrived=5, held=5, redone=6)  # has it, and nothing to make it from
B = Holding(launched=5, arrived=4, held=5, redone=5)
C = Holding(launched=5, arrived=5, held=5, redone=5)  # can make it again
AWAY = Holding(launched=6, arrived=5, held=6, redone=6)  # has gone on from it
LATE = Holding(launched=4, arrived=4, held=5, redone=5)  # has yet to launch it


@pytest.mark.parametrize(
    ("holdings", "suffices", "plan"),
    [
        ([A, A], True, FragmentPlan((), 6)),
        ([B, B], True, FragmentPlan((), 5)),
        ([LATE, B], True, FragmentPlan((), 5)),
        ([B, A, B], True, FragmentPlan((HandOver(5, 1, (0, 2)),), 6)),
        ([B, C], False, FragmentPlan((), 5)),
        ([B, A], False, FragmentPlan((), 5, lacking=5)),
        ([B, AWAY], True, FragmentPlan((), 5, lacking=5)),
        ([LATE, A], True, FragmentPlan((), 5, lacking=5)),
        ([LATE, C], True, FragmentPlan((), 5)),
    ],
)
def test_plans(holdings: list[Holding], suffices: bool, plan: FragmentPlan) -> None:
    assert plan_fragment(holdings, lambda _: suffices) == plan


def test_what_one_went_on_from_and_nobody_holds_is_refused_by_name(tmp_path: Path) -> None:
    first, second = (new_run("blocking", "dense", 2) for _ in range(2))
    for step in range(1, 7):
        if step == 6:
            hold(first, (1,))
        first.train_step(loss)
    for m, loop in enumerate(first.loops):  # as at a save where nobody was told to end
        assert loop.deferral.is_deferred == (m == 1)
    save_all(first, tmp_path)
    said = r"fragment 0, launch 2: cluster 0 went on from its mean .* cluster 1 saved without it"
    with pytest.raises(ValueError, match=said):
        resume(second, first, tmp_path)
