"""tau that follows from the line: what all clusters agree on decides, and a checkpoint keeps it."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

import dsx
from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.config.schema import preset
from dsx.core.types import History, Stage, SyncParams
from dsx.engines.simulated import SimulatedClusters
from dsx.method.delay.average import Average
from dsx.method.delay.delay_compensation import DelayCompensation
from dsx.method.delay.shift import Shift
from dsx.method.delay.streaming import StreamingMerge
from dsx.method.ladder import Ladder
from dsx.outer.measurements import Measurements
from dsx.outer.overlap import Overlap
from tests.checkpoint.saved import save_state
from tests.simulated import Simulated
from tests.tiny import TinyNet, mean_loss

INTERVAL, NUM_STEPS = 8, 40
DELAYS = ("shift", "streaming", "compensation", "average")
POLICIES = (Shift("auto"), StreamingMerge("auto"), DelayCompensation("auto"), Average("auto"))


def adamw(model: torch.nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


@pytest.fixture
def transfers_take(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, float]]:
    """By cluster, the inner steps that its transfers take."""
    steps: dict[int, float] = {}

    def post(self: Measurements, sideband: Any, fragment: int, history: History) -> None:
        position = self._place
        if not self._method.uses_seconds:
            return
        sideband.post(position, [0.5, 0.5 * steps[position], 0.0])

    monkeypatch.setattr(Measurements, "post", post)
    yield steps


def started(delay: str, steps: int | str, num_clusters: int = 2) -> tuple[Simulated, list[Any]]:
    outer = {"type": "none"} if delay == "average" else {"type": "sgd", "lr": 1.0}
    method = preset(
        "streaming_diloco", num_clusters, fragments={"num_fragments": 2},
        schedule={"interval": INTERVAL}, delay={"type": delay, "steps": steps},
        outer_optimizer=outer,
    )  # fmt: skip
    events: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dsx.SettingWarning)  # simulated transfers take no seconds
        run = Simulated(TinyNet(), adamw, method, num_clusters)
    for loop in run.loops:
        loop._on_sync = events.append
    return run, events


def train(run: SimulatedClusters, steps: int) -> None:
    for _ in range(steps):
        run.train_step(mean_loss)


@pytest.mark.parametrize("policy", POLICIES, ids=DELAYS)
def test_tau_is_a_transfer_in_steps_up_to_half_a_period(policy: Any) -> None:
    history = History(4)
    assert policy.uses_seconds
    assert policy.overlap(0, 16, history) == 4  # nothing measured: until the next launch
    history.step_seconds = 2.0
    for seconds, steps in ((0.1, 1), (2.0, 1), (2.1, 2), (9.0, 5), (16.0, 8), (500.0, 8)):
        history.transfer_seconds[1] = seconds
        assert policy.overlap(1, 16, history) == steps
    history.transfer_seconds[1] = 2.0
    assert policy.overlap(1, 16, history, shared_by=4) == 4  # they share the line
    assert type(policy)(3).overlap(1, 16, history) is None


@pytest.mark.parametrize("delay", DELAYS)
def test_all_clusters_go_by_the_slowest(delay: str, transfers_take: dict[int, float]) -> None:
    transfers_take.update({0: 0.4, 1: 2.5, 2: 1.9})
    run, events = started(delay, "auto", 3)
    train(run, NUM_STEPS)
    late = [(e["launched_step"], e["applied_step"], e["overlap_steps"]) for e in events]
    assert {applied - launched for launched, applied, _ in late} == {3, 4}  # 4: not yet measured
    assert {tau for launched, _, tau in late if launched > INTERVAL + 4} == {3}
    assert all(applied - launched == tau for launched, applied, tau in late)
    assert all(late.count(one) == 3 for one in late)


@pytest.mark.parametrize("delay", DELAYS)
def test_equals_a_run_with_that_number(delay: str, transfers_take: dict[int, float]) -> None:
    transfers_take.update({0: 3.2, 1: 1.0})
    measured, fixed = started(delay, "auto")[0], started(delay, 4)[0]
    train(measured, NUM_STEPS)
    train(fixed, NUM_STEPS)
    for ours, theirs in zip(measured.parameters(), fixed.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("stop", [10, 14, 18])
def test_a_checkpoint_keeps_what_a_launch_was_given(
    stop: int, transfers_take: dict[int, float], tmp_path: Path
) -> None:
    transfers_take.update({0: 1.2, 1: 1.2})
    whole, first = started("shift", "auto")[0], started("shift", "auto")[0]
    train(whole, NUM_STEPS)
    train(first, stop)
    for m, loop in enumerate(first.loops):
        save_state(loop, tmp_path / f"cluster_{m}", RankInfo(m, 2, 0, 1), "run-a", {}, {})
    again = started("shift", "auto")[0]
    for m, loop in enumerate(again.loops):
        again.models[m].load_state_dict(first.models[m].state_dict())
        optimizer, other = again.optimizers[m], first.optimizers[m]
        assert isinstance(optimizer, Optimizer) and isinstance(other, Optimizer)
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        load_state(loop, tmp_path / f"cluster_{m}", RankInfo(m, 2, 0, 1), {})
    train(again, NUM_STEPS - stop)
    for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_a_number_is_not_made_auto_by_a_resume(tmp_path: Path) -> None:
    saved = started("shift", 4)[0]
    train(saved, 10)
    for m, loop in enumerate(saved.loops):
        axes = {"delay": {"type": "shift", "steps": 4}}
        save_state(loop, tmp_path / f"cluster_{m}", RankInfo(m, 2, 0, 1), "run-a", axes, {})
    again = started("shift", "auto")[0]
    axes = {"delay": {"type": "shift", "steps": "auto"}}
    with pytest.raises(ValueError, match=r"saved with delay.steps=4, and this run has 'auto'"):
        load_state(again.loops[0], tmp_path / "cluster_0", RankInfo(0, 2, 0, 1), axes)


def test_tau_fits_the_least_h_that_a_controller_may_set(transfers_take: dict[int, float]) -> None:
    transfers_take.update({0: 50.0, 1: 50.0})
    method = preset(
        "dilocox", 2, schedule={"interval": 12}, fragments={"num_fragments": 1},
        delay={"type": "streaming", "steps": "auto"}, compression={"type": "dense"},
        control={"rank": 4, "max_rank": 6, "min_interval": 4},
    )  # fmt: skip
    overlap = Overlap(method, Stage(), Ladder(method, 1))
    assert overlap.sync_params(0, SyncParams(12), History(1), 1).overlap == 2
    with pytest.raises(ValueError, match="needs a step between two launches"):
        preset("dilocox", 2, delay={"type": "streaming", "steps": "auto"},
               control={"rank": 4, "max_rank": 6, "min_interval": 1})  # fmt: skip


def test_a_line_that_is_too_slow_is_said_once(
    transfers_take: dict[int, float], caplog: pytest.LogCaptureFixture
) -> None:
    transfers_take.update({0: 5.5, 1: 2.0})
    run, _ = started("shift", "auto")
    with caplog.at_level(logging.WARNING):
        train(run, NUM_STEPS)
    said = [record.getMessage() for record in caplog.records if "half of" in record.getMessage()]
    assert len(said) == 2  # one per cluster
    assert "fragment 0 takes 2.75 s on the line, 5.5 inner steps of 0.5 s" in said[0]
    assert "an interval of 12 or more" in said[0]


def test_more_than_half_a_period_is_warned_of() -> None:
    with pytest.warns(dsx.SettingWarning, match=r"delay.steps=9 .* use delay.steps <= 8"):
        preset("streaming_diloco", schedule={"interval": 16}, delay={"steps": 9}).validate(2)


def test_a_period_of_one_step_has_no_room() -> None:
    with pytest.raises(ValueError, match="needs a step between two launches"):
        preset("diloco", schedule={"interval": 1}, delay={"type": "shift", "steps": "auto"})
