"""Steps down the ladder are the same in all clusters, over a network and in a run that goes on."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsx.checkpoint.pipeline_repartition import merged_history
from dsx.core.types import Stage
from dsx.engines import simulated
from dsx.method.ladder import Ladder
from dsx.method.method import Method
from tests.checkpoint.half_arrived import (
    HoldingHub,
    assert_same,
    catch_up,
    hold,
    lacking,
    resume,
    save_all,
)
from tests.levels import by_default
from tests.method.test_control import StageOfTwo
from tests.outer.test_guard import over_gloo  # noqa: F401 - a fixture
from tests.outer.test_ladder import DOWN, loss, overlapped, rungs_of, started, stepping, train
from tests.simulated import Simulated


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


@pytest.mark.parametrize("stop", [24, 28])  # of the alarm, and where all know of it
def test_a_cluster_that_is_stopped_in_a_boundary_goes_down_with_the_others(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has applied the mean, the other has put it off."""
    monkeypatch.setattr(simulated, "InProcessHub", HoldingHub)
    method = stepping("diloco", 2, schedule={"interval": 4})
    first, undisturbed = train(started(method), stop - 1), train(started(method), 60)
    hold(first, (1,))
    train(first, stop)
    assert [bool(indices) for indices in lacking(first)] == [False, True]
    save_all(first, tmp_path, keeps_last=True)
    second = started(method)
    resume(second, first, tmp_path)
    catch_up(second, loss)
    assert_same(train(second, 60), undisturbed)
    assert rungs_of(undisturbed) == DOWN[:2]


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
    """Two would go down, and the third would not, or later: it is averaged again."""
    run = train(started(nearly_too_much(), 3), at)
    turn_round(run, 2)
    undisturbed = train(started(nearly_too_much(), 3), 40)

    def look() -> None:
        rungs_of(run)  # of histories that are alike

    train(run, 40, look)
    assert rungs_of(run) == ["gain"]
    assert run.loops[2].history == undisturbed.loops[2].history


def test_a_refused_round_keeps_what_waits_to_be_known() -> None:
    run = train(started(nearly_too_much(), 3), 13)  # the alarm was in round 6, at step 12
    next(run.models[1].parameters()).data[0] = torch.nan
    train(run, 14)
    assert {loop.totals.refused for loop in run.loops} == {1} and rungs_of(run) == []
    assert rungs_of(train(run, 17)) == ["gain"]


def test_one_cluster_alone_goes_down_too() -> None:
    assert (
        rungs_of(train(started(stepping("diloco", 1, schedule={"interval": 2}), 1), 60))
        == (DOWN[:3])
    )


def test_stages_that_are_cut_anew_keep_their_rungs() -> None:
    loop = started(overlapped("shift")).loops[0]
    for rungs in ([], ["gain"]):
        loop.history.guard["rungs"] = rungs
        saved = SimpleNamespace(meta={"history": loop.history.state_dict()})
        origin: Any = SimpleNamespace(ranks=[saved], fragment=0)
        assert Ladder(loop.method, 2).taken(merged_history(loop, [[origin], [origin]])) == rungs


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
