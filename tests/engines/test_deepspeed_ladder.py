"""A pipeline goes down the ladder with all its stages, though one alone has seen why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.engines.engines import quiet
from tests.engines.pipelines import Kind, build_pipeline, train_batch
from tests.installed import needs

pytestmark = [needs("deepspeed"), pytest.mark.ci]

KIND = Kind(1, preset="diloco", is_tied=True, groups="two")
BLOCK = {
    "guard": {"action": "step_down"},
    "delay": {"type": "shift", "steps": 1},
    "outer_optimizer": {"type": "sgd", "lr": 0.8},
}
SEEN = (6, 10, 15, 18)  # steps at which stage 1 has something due; H is 4
NUM_STEPS = 30


def train() -> tuple[int, list[Any], list[Any]]:
    quiet()
    engine = build_pipeline(KIND, BLOCK)
    loop, events = engine.dsx.loop, list[Any]()
    loop._on_sync = events.append
    rungs: list[Any] = []
    for step in range(1, NUM_STEPS + 1):
        if step in SEEN and loop.adapter.stage.index == 1:
            loop.history.guard["due"] = ["gain"]
        train_batch(engine, step)
        rungs.append(list(loop.history.guard.get("rungs", [])))
    loop.drain()
    names = ("launched_step", "applied_step", "interval")
    found = [[event[name] for name in names] for event in events]
    engine.dsx.close()
    engine.destroy()
    return loop.adapter.stage.index, rungs, found


def test_the_stages_of_both_clusters_go_down_together() -> None:
    results = run_distributed(train, 4, timeout_seconds=240)
    assert sorted(stage for stage, _, _ in results) == [0, 0, 1, 1]
    _, rungs, syncs = results[0]
    assert all(theirs == rungs for _, theirs, _ in results)
    assert all(theirs == syncs for _, _, theirs in results)
    first_with = [
        next(s for s, taken in enumerate(rungs, 1) if len(taken) == n) for n in (1, 2, 3, 4)
    ]
    assert first_with == [9, 13, 17, 21] and rungs[-1] == ["gain", "gain", "interval", "blocking"]
    assert [launched for launched, _, _ in syncs][:7] == [4, 8, 12, 16, 18, 20, 22]
    assert [applied - launched for launched, applied, _ in syncs][:7] == [1] * 6 + [0]
