"""A cluster of a pipeline, or of Megatron, is killed: the others go on; started again, it joins."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import free_port
from tests.installed import needs
from tests.launch.numbered import require_read_as_due
from tests.launch.sites_of_three import Sites
from tests.launch.test_launch import launch

pytestmark = [needs("deepspeed"), pytest.mark.timeout(900)]
PATIENCE = 240  # seconds, on a busy machine, for what starts processes
CI, SLOW = pytest.mark.ci, pytest.mark.slow
__all__ = ["launch"]


def told_by(out: Path, clusters: list[int]) -> list[dict[str, Any]]:
    """What clusters have told at the end, which each has of all."""
    (everyone,) = {Path(f"{out}.{m}").read_text() for m in clusters}
    told = json.loads(everyone)
    assert [one["cluster"] for one in told] == clusters
    assert len({(one["checksum"], one["step"]) for one in told}) == 1
    return told


def go_and_come_back(
    launch: Any,
    folder: Path,
    script: str,
    *args: Any,
    how: Callable[[], Any] = lambda: 2,
    victim: int = 0,
    change: Callable[[Sites], object] = lambda sites: None,
) -> list[dict[str, Any]]:
    """Kill one of three; the others go on, and it joins them. Return what all tell at the end."""
    sites = Sites(folder, launch, script=Path(__file__).with_name(script), how=how)
    sites.change("fragments", num_fragments=2)  # of each stage
    change(sites)
    given = ["--out", folder / "end", "--stop-file", folder / "stop", *args]
    clusters = sites.start("first", *given)
    for cluster in clusters:
        cluster.wait_for("step 8\n", PATIENCE)
    clusters[victim].end()
    others = [m for m in range(3) if m != victim]
    for m in others:
        named = ", ".join(map(str, others))
        clusters[m].wait_for(f"cluster {victim} is lost: going on with clusters {named}", PATIENCE)
    clusters[victim] = again = sites.start_one(victim, "again", *given)
    again.wait_for("has joined the run at step", PATIENCE)
    joined_at = int(again.output().partition("has joined the run at step ")[2].partition(":")[0])
    for m in others:
        clusters[m].wait_for(f"cluster {victim} is back: going on with clusters 0, 1, 2", PATIENCE)
    again.wait_for(f"step {joined_at + 12}\n", PATIENCE)
    (folder / "stop").touch()
    for cluster in clusters:
        assert cluster.wait(PATIENCE) == 0, cluster.output()
    told = told_by(folder / "end", [0, 1, 2])
    assert joined_at > 8
    assert [one["started_at"] for one in told] == [joined_at * (m == victim) for m in range(3)]
    return told


@CI
def test_a_pipeline_goes_on_and_comes_back(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = go_and_come_back(launch, tmp_path, "train_pipeline.py")
    require_read_as_due(told, micro_batch=3, replicas=1, is_shuffled=False)
    assert all(one["engine_steps"] == one["step"] for one in told)
    with capsys.disabled():
        print(f"\nlongest step, beside a usual one: {[(o['longest'], o['usual']) for o in told]}")


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="no megatron-core")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("pipeline", marks=SLOW),
        pytest.param("tensor", marks=SLOW),
        pytest.param("sharded", marks=SLOW),
    ],
)
def test_megatron_goes_on_and_comes_back(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    told = go_and_come_back(launch, tmp_path, "train_megatron.py", "--layout", layout, victim=2)
    with capsys.disabled():
        print(f"\nlongest step, beside a usual one: {[(o['longest'], o['usual']) for o in told]}")


def by_torchrun() -> list[Any]:
    return ["torchrun", "--nproc-per-node", 2, "--master-port", free_port()]


@SLOW
def test_fully_sharded_ranks_go_on_and_come_back(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = go_and_come_back(launch, tmp_path, "train_sharded.py", how=by_torchrun)
    with capsys.disabled():
        print(f"\nlongest step, beside a usual one: {[(o['longest'], o['usual']) for o in told]}")
