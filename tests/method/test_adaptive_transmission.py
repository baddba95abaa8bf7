"""CoCoDC's choice of what to send when, from values that are agreed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsx.config.schema import ConfigError, preset
from dsx.core.transport import PeerLost
from dsx.core.types import History, Stage, SyncParams
from dsx.method.schedule.adaptive_transmission import AdaptiveTransmission
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss


def run(
    schedule: AdaptiveTransmission,
    num_fragments: int,
    num_steps: int,
    norms: Callable[[int], float],
    stage: Stage = Stage(),  # noqa: B008 - frozen
) -> list[tuple[int, int]]:
    """Every launch applied at once, with the given norm of its mean per fragment."""
    history = History(num_fragments)
    sync_params = SyncParams(schedule.interval)
    schedule.advance(history, sync_params)
    launches = []
    for step in range(1, num_steps + 1):
        due = schedule.due(step, history, sync_params, stage)
        history.step = step
        for p in due:
            history.intervals[p] = step - history.launched[p]
            history.launched[p] = history.applied[p] = step
            history.rounds[p] += 1
            history.mean_norm[p] = norms(p)
            launches.append((step, p))
        schedule.advance(history, sync_params)
    return launches


def test_as_often_as_the_link_carries() -> None:
    """Eq. 9: gamma*H*T_c/T_s = 0.5 * 20 * 3 / 5 = 6 transmissions in H = 20 steps, not 4."""
    schedule = AdaptiveTransmission(20, gamma=0.5, step_seconds=3.0, transfer_seconds=5.0)
    launches = run(schedule, 4, 105, lambda p: 1.0)
    epoch = launches[0][0]  # T_s is known once the first has been applied
    assert epoch == 5
    steps = [step for step, _ in launches[1:]]
    assert steps == [epoch + math.ceil(j * 20 / 6) for j in range(1, len(steps) + 1)]
    assert len(steps) == 30


def test_stages_share_the_link_and_take_turns() -> None:
    """N = 12 in H = 24 steps: six each from two stages, four each from three."""
    schedule = AdaptiveTransmission(24, gamma=0.5, step_seconds=1.0, transfer_seconds=1.0)
    for count, each in ((2, 6), (3, 4)):
        stages = [run(schedule, 3, 250, lambda p: 1.0, Stage(s, count)) for s in range(count)]
        steps = [[step for step, _ in launches] for launches in stages]
        assert [len([t for t in own if 48 < t <= 240]) for own in steps] == [8 * each] * count
        together = [t for own in steps for t in own if t > 48]
        assert len(set(together)) == len(together)


def test_a_slow_link_carries_each_fragment_once() -> None:
    schedule = AdaptiveTransmission(20, gamma=0.1, step_seconds=1.0, transfer_seconds=1.0)
    launches = run(schedule, 4, 80, lambda p: 1.0)
    assert len(launches) == 16
    assert {p for _, p in launches[:4]} == {0, 1, 2, 3}


def test_the_fastest_changing_goes_first_but_none_waits_longer_than_two_decisions_past_h() -> None:
    schedule = AdaptiveTransmission(12, gamma=1.0, step_seconds=1.0, transfer_seconds=1.5)
    launches = run(schedule, 4, 240, lambda p: 100.0 if p == 2 else 1.0)
    counts = [sum(q == p for _, q in launches) for p in range(4)]
    assert counts[2] == max(counts) and counts[2] > 1.5 * counts[0]
    for p in range(4):
        steps = [0] + [step for step, q in launches if q == p]
        assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 12 + 2 * 4


def test_norms_count_per_element_if_asked() -> None:
    history = History(2, [100, 1])
    history.mean_norm, history.intervals, history.rounds = [5.0, 1.0], [1, 1], [1, 1]
    history.launched = [4, 4]
    for norm, expected in (("l2", 0), ("rms", 1)):
        schedule = AdaptiveTransmission(4, 1.0, norm, 1.0, 1.0)  # type: ignore[arg-type]
        history.plan = {"transmissions": 4, "epoch": 4, "is_warned": True}
        assert schedule.due(6, history, SyncParams(4), Stage()) == [expected]


def test_what_the_link_cannot_carry_is_refused_with_the_interval_that_would_do() -> None:
    link = {"step_seconds": 1.0, "transfer_seconds": 10.0}
    with pytest.raises(ConfigError, match=r"4 transfers of 10 s .* use interval >= 40"):
        preset("cocodc", schedule={"interval": 30, **link})
    preset("cocodc", schedule={"interval": 40, **link})


def test_a_link_found_too_slow_while_training_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule = AdaptiveTransmission(10)
    history = History(2)
    schedule.advance(history, SyncParams(10))
    history.rounds, history.step_seconds, history.transfer_seconds = [1, 1], 1.0, [8.0, 8.0]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            schedule.advance(history, SyncParams(10))
    assert [r.message for r in caplog.records] == [
        "the link cannot carry every fragment once in schedule.interval=10 steps: 2 transfers of "
        "8 s, steps of 1 s; training will wait for it, or use interval >= 16"
    ]


@pytest.mark.parametrize("transfer_seconds", [0.01, 3.0, 60.0, 5000.0])
@pytest.mark.parametrize("num_fragments", [1, 3, 7])
def test_no_cluster_goes_on_for_a_period_without_a_transfer(
    num_fragments: int, transfer_seconds: float
) -> None:
    """Whatever was measured: a stop that is agreed on relies on it."""
    schedule, history, sync_params = (
        AdaptiveTransmission(20),
        History(num_fragments),
        SyncParams(20),
    )
    history.step_seconds, history.transfer_seconds = 0.1, [transfer_seconds] * num_fragments
    history.rounds = [1] * num_fragments
    schedule.advance(history, sync_params)
    launches = [0]
    for step in range(1, 600):
        for p in schedule.due(step, history, sync_params, Stage()):
            history.launched[p] = step
            launches.append(step)
        history.step = step
        schedule.advance(history, sync_params)
    assert max(b - a for a, b in zip(launches, [*launches[1:], 600], strict=True)) <= 20


def test_measured_seconds_are_the_largest_of_all_clusters() -> None:
    """Cluster 1 reports slower steps and transfers; both clusters then plan with its numbers."""
    case = ALL_CASES["cocodc"]
    schedule = {**case.overrides["schedule"], "step_seconds": None, "transfer_seconds": None}
    method = preset("cocodc", **{**case.overrides, "schedule": schedule})
    run = Simulated(TinyNet(), sgd, method, 2)
    for loop, (compute, transfer) in zip(run.loops, [(1.0, 0.5), (3.0, 1.0)], strict=True):
        loop.measurements.begin_boundary = lambda now: None  # type: ignore[method-assign]
        loop.measurements._step_seconds.append(compute)
        loop.measurements._transfer_seconds = dict.fromkeys(range(3), transfer)
    for _ in range(12):
        run.train_step(mean_loss)
    for loop in run.loops:
        assert loop.history.step_seconds == 3.0
        assert set(loop.history.transfer_seconds) == {1.0}
        assert loop.history.plan["transmissions"] == 6  # 0.7 * 6 * 3 / 1 = 12, at most H
    assert run.loops[0].history == run.loops[1].history


def test_a_disagreement_is_named() -> None:
    link = {"step_seconds": 1.0, "transfer_seconds": 1.0, "gamma": 1.0}
    method = preset("cocodc", schedule={"interval": 20, **link}, delay={"steps": 1})
    run = Simulated(TinyNet(), sgd, method, 2)
    for _ in range(24):
        run.train_step(mean_loss)
    history = run.loops[1].history
    rates = [norm / i for norm, i in zip(history.mean_norm, history.intervals, strict=True)]
    slowest = min((p for p in range(4) if not history.under_way[p]), key=lambda p: rates[p])
    history.mean_norm[slowest] = 1e9  # as if cluster 1 had decoded another mean
    said = rf"cluster 0 has fragment \d .*, cluster 1 fragment {slowest} .*: the clusters have lost"
    with pytest.raises(PeerLost, match=said):
        for _ in range(6):
            run.train_step(mean_loss)


def sgd(model: torch.nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)
