"""An early stop over DeepSpeed: every rank of every cluster, and every stage, at the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dsx.comm.world import current_world
from tests.distributed import run_distributed
from tests.engines.engines import quiet
from tests.engines.resumes import PLACES, ROWS, build, end, take_step
from tests.installed import needs

pytestmark = needs("deepspeed")


class Stop(NamedTuple):
    """Who asks at which step, by number over all clusters (0, 1: cluster 0).

    `ahead`: the other cluster has taken so many steps by then, as many as it can; None: whatever
    it is. `num_periods`: n + 3, n being the rounds under way.
    """

    place: str
    row: str
    asked: dict[int, int]
    ahead: int | None
    num_periods: int


STOPS = [
    Stop("zero1", "diloco", {3: 6}, 7, 3),
    Stop("zero1", "eager_2", {3: 8}, 19, 5),
    Stop("zero1", "cocodc", {0: 11, 3: 11, 1: 12}, None, 3),
    Stop("pipeline, zero1", "streaming_diloco", {1: 6}, 8, 3),
]
MORE = [
    Stop("zero1", "diloco", {1: 0}, None, 3),
    Stop("zero1", "streaming_diloco", {3: 7}, 9, 3),
    Stop("pipeline, zero1", "diloco", {3: 3}, None, 3),
    Stop("pipeline, zero1", "co2", {2: 5}, 11, 4),
    Stop("pipeline, zero1", "diloco_delayed", {0: 5, 1: 5, 2: 5, 3: 5}, None, 4),
]


def train_until_told(engine: Any, stop: Stop, name: str) -> None:
    rank = 2 * engine.dsx.cluster_id + engine.global_rank
    pace = current_world().rendezvous.group_store(name)
    for step in range(100):
        if stop.asked.get(rank) == step:
            if stop.ahead is not None:
                pace.wait([f"{1 - engine.dsx.cluster_id} took {stop.ahead}"])
            engine.dsx.request_stop(f"rank {rank} has had enough")
        if engine.dsx.should_stop():
            return
        take_step(engine, step + 1)
        pace.set(f"{engine.dsx.cluster_id} took {step + 1}", "")


def stop_when_asked(base: str, stops: list[Stop]) -> list[dict[str, Any]]:
    """Train until told to stop, save, and see that the run can go on from there."""
    quiet()
    results = []
    for index, stop in enumerate(stops):
        row, place = ROWS[stop.row], PLACES[stop.place]
        engine = build(row, place)
        train_until_told(engine, stop, f"pace {index}")
        engine.save_checkpoint(f"{base}/{index}")
        result = {"step": engine.dsx.step, "interval": engine.dsx.method.schedule.interval}
        engine.dsx.finish()
        end(engine)
        resumed = build(row, place)
        resumed.load_checkpoint(f"{base}/{index}")
        assert not resumed.dsx.should_stop()
        take_step(resumed, resumed.dsx.step + 1)
        results.append({**result, "went on to": resumed.dsx.step})
        end(resumed)
    return results


def stopped_at_the_same_step(stops: list[Stop], base: Path) -> None:
    ranks = run_distributed(stop_when_asked, 4, str(base), stops, timeout_seconds=200)
    for stop, (first, *others) in zip(stops, zip(*ranks, strict=True), strict=True):
        assert others == [first] * 3, stop
        asked_at = min(stop.asked.values())
        assert asked_at < first["step"] <= asked_at + stop.num_periods * first["interval"], stop
        assert first["went on to"] == first["step"] + 1, stop


def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    stopped_at_the_same_step(STOPS, tmp_path)


@pytest.mark.ci
def test_more_stop_at_the_same_step(tmp_path: Path) -> None:
    stopped_at_the_same_step(MORE, tmp_path)
