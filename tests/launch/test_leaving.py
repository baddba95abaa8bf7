"""Sites that are told to end: the others go on, or all save and can go on from there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.tags import complete_tags
from tests.installed import needs
from tests.launch.sites_of_three import Sites
from tests.launch.test_launch import launch

pytestmark = [needs("deepspeed"), pytest.mark.ci, pytest.mark.timeout(600)]
__all__ = ["launch"]


def newest(sites_folder: Path, cluster: int) -> dict[str, Any]:
    tags = complete_tags(sites_folder / "run" / "checkpoints" / f"cluster_{cluster}")
    return max(tags.values(), key=lambda manifest: manifest["step"])


def results(out: Path) -> list[dict[str, Any]]:
    (told,) = {Path(f"{out}.{m}").read_text() for m in range(3)}
    return json.loads(told)


def test_two_of_three_go_on_without_one_that_gets_sigterm_and_then_nobody_may_leave(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = Sites(tmp_path, launch)
    sites.change("clusters", leave_after_seconds=1.0)
    clusters = sites.start("first", "--steps", 10_000, "--stop-file", tmp_path / "stop")
    for cluster in clusters:
        cluster.wait_for("step 10\n", 180)
    sites.signal_ranks(2)
    told = time.monotonic()
    assert clusters[2].wait() == 0, clusters[2].output()
    seconds = time.monotonic() - told
    output = clusters[2].output()
    assert "training on for 1.0 s" in output and "the others go on without this cluster" in output
    assert "leaving the others, told to by SIGTERM (cluster 2); saved in" in output
    for m in range(2):
        clusters[m].wait_for("cluster 2 has left: going on with clusters 0, 1", 20)
    left = newest(tmp_path, 2)
    assert left["is_preempted"] and left["has_left"]
    refused = sites.ctl("leave", "--cluster", 1)
    assert (
        refused.returncode == 2 and "oslo (cluster 1): this cluster cannot leave" in refused.stderr
    )
    (tmp_path / "stop").touch()
    for m in range(2):
        assert clusters[m].wait(120) == 0, clusters[m].output()
        assert "is lost" not in clusters[m].output()
    steps = [
        one
        for one in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if one.get("kind") == "step"
    ]
    assert [one["step"] for one in steps] == list(range(1, len(steps) + 1))
    assert len(steps) > left["step"] + 10
    longest = max((one["seconds"], one["step"]) for one in steps[5:])
    with capsys.disabled():
        print(f"\nexit 0 {seconds:.1f} s after SIGTERM; longest step of the others: {longest}")
    assert longest[0] < 5


@pytest.mark.slow
def test_where_all_are_told_within_seconds_all_save_and_go_on_from_there(
    launch: Any, tmp_path: Path
) -> None:
    sites = Sites(tmp_path, launch)
    clusters = sites.start("first", "--steps", 1000)
    for cluster in clusters:
        cluster.wait_for("step 10\n", 180)
    for m in (1, 0, 2):
        sites.signal_ranks(m)
        time.sleep(1.0)
    for cluster in clusters:
        cluster.wait()
        cluster.wait_for_ranks()
        assert "told to end by SIGTERM (cluster 1); saved in" in cluster.output()
        assert "all save and end" in cluster.output()
        assert "go on without" not in cluster.output()
    found = [newest(tmp_path, m) for m in range(3)]
    assert all(one["is_preempted"] and not one["has_left"] for one in found)
    assert {tuple(one["members"]) for one in found} == {()}
    last = max(one["step"] for one in found)
    assert last - min(one["step"] for one in found) < 8
    saved = ["--resume", "--save-dir", tmp_path / "run" / "checkpoints"]
    resumed = sites.start("second", "--steps", last + 6, *saved, "--out", tmp_path / "out",
                          step_seconds=0)  # fmt: skip
    for cluster in resumed:
        assert cluster.wait(200) == 0, cluster.output()
    ended = results(tmp_path / "out")
    assert [one["started_at"] for one in ended] == [one["step"] for one in found]
    assert len({one["checksum"] for one in ended}) == 1


def test_ctl_leave(launch: Any, tmp_path: Path) -> None:
    """The first one leaves, by which all have met; the others end by an order, and all resume."""
    sites = Sites(tmp_path, launch)
    clusters = sites.start("first", "--steps", 1000)
    for cluster in clusters:
        cluster.wait_for("step 6\n", 180)
    done = sites.ctl("leave", "--cluster", 0, at=2)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert "berlin (cluster 0) saves at the end of a step, and leaves" in done.stdout
    assert "oslo (cluster 1), rome (cluster 2) go on without it" in done.stdout
    assert clusters[0].wait() == 0, clusters[0].output()
    assert "told to by dsx ctl leave (cluster 0); saved in" in clusters[0].output()
    stopped = sites.ctl("stop", at=2)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    for m in (1, 2):
        assert clusters[m].wait() == 0, clusters[m].output()
        assert "cluster 0 has left: going on with clusters 1, 2" in clusters[m].output()
    assert newest(tmp_path, 0)["has_left"] and newest(tmp_path, 1)["members"] == [1, 2]

    last = newest(tmp_path, 1)["step"]  # also for the one that has left: it takes their state
    saved = ["--resume", "--save-dir", tmp_path / "run" / "checkpoints"]
    resumed = sites.start("second", "--steps", last + 6, *saved, "--out", tmp_path / "out",
                          step_seconds=0)  # fmt: skip
    for cluster in resumed:
        assert cluster.wait(300) == 0, cluster.output()
    ended = results(tmp_path / "out")
    assert [one["started_at"] for one in ended] == [last] * 3
    assert len({one["checksum"] for one in ended}) == 1
