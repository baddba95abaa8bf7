"""Two clusters, and half of them is lost: the other one saves and waits, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.run_folder import read_about
from tests.installed import needs
from tests.launch.sites_of_three import Sites, ranks_of
from tests.launch.test_launch import Launcher, launch, results

pytestmark = [needs("deepspeed"), pytest.mark.ci, pytest.mark.timeout(600)]
__all__ = ["launch"]
NAMES = ("berlin", "oslo")
SLOW = pytest.mark.slow


def two_sites(tmp_path: Path, launch: Any, **metrics: Any) -> tuple[Sites, Any]:
    """Return sites that have trained for a while, and what starts one of them."""
    sites = Sites(tmp_path, launch, NAMES)
    sites.change("metrics", **metrics)

    def start(m: int, way: str, *args: Any) -> Launcher:
        return launch(
            f"{way}_{NAMES[m]}", 2, "--deepspeed_config", sites.configs[m],
            "--out", tmp_path / "out", "--steps", 10_000, "--step-seconds", 0.1,
            "--stop-file", tmp_path / "stop", "--dsx-cluster-id", m, *args,
        )  # fmt: skip

    sites.launchers = [start(m, "first") for m in range(2)]
    for cluster in sites.launchers:
        cluster.wait_for("step 6\n", 180)
    return sites, start


def joined_at(cluster: Launcher) -> int:
    cluster.wait_for("has joined the run at step", 120)
    return int(cluster.output().partition("has joined the run at step ")[2].partition(":")[0])


def end_all(tmp_path: Path, *clusters: Launcher) -> None:
    """All stop at one step, and hold the same."""
    (tmp_path / "stop").touch()
    for cluster in clusters:
        assert cluster.wait(120) == 0, cluster.output()
    told = results(tmp_path / "out")
    assert told[0] == told[1] and [one["cluster"] for one in told[0]] == [0, 1]
    assert len({(one["checksum"], one["step"]) for one in told[0]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_of_two_without_an_arbiter_who_is_killed_comes_back(
    launch: Any, tmp_path: Path, victim: int
) -> None:
    """The other one waits for it, and goes on once its restart has shown that it had ended."""
    sites, start = two_sites(tmp_path, launch)
    survivor = sites.launchers[1 - victim]
    sites.launchers[victim].end()
    survivor.wait_for(f"waits for cluster(s) {victim}")
    told = sites.ctl("status", "--json", at=1 - victim)
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout)["clusters"][str(1 - victim)]
    assert answer["state"] == "waiting" and answer["waiting"]["clusters"] == [victim]
    refused = sites.ctl("save", at=1 - victim)
    assert refused.returncode == 2 and f"waits for cluster(s) {victim}" in refused.stderr
    step = answer["step"]
    saved = tmp_path / "run" / "checkpoints" / f"cluster_{1 - victim}" / f"preempted_step{step}"
    assert json.loads((saved / "dsx.json").read_text())["members"] == [1 - victim]
    again = start(victim, "again")
    step = joined_at(again)
    survivor.wait_for(f"cluster {victim} is lost: going on with cluster {1 - victim}")
    survivor.wait_for(f"cluster {victim} is back: going on with clusters 0, 1")
    again.wait_for(f"step {step + 8}\n")
    end_all(tmp_path, survivor, again)
    assert not (tmp_path / "run-2").exists()  # its records go on where they were
    starts = read_about(tmp_path / "run")[victim]["starts"]
    assert [one["step"] for one in starts] == [0, step]


def test_a_forced_view_has_one_of_two_go_on_alone(launch: Any, tmp_path: Path) -> None:
    """A key and a typed word; who was left out joins as it is started again."""
    sites, start = two_sites(tmp_path, launch)
    survivor = sites.launchers[0]
    sites.launchers[1].end()
    survivor.wait_for("waits for cluster(s) 1")
    asked = sites.ctl("force-view", "--without", 1, words="no\n")
    assert (
        asked.returncode == 1 and "TWO RUNS" in asked.stdout and "nothing is done" in asked.stderr
    )
    done = sites.ctl("force-view", "--with", 0, words="without 1\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "berlin (cluster 0) go(es) on, in view" in done.stdout
    print(done.stdout)
    survivor.wait_for("berlin has forced a view without cluster(s) 1, in place of view")
    survivor.wait_for("cluster 1 is lost: going on with cluster 0")
    again = start(1, "again")
    step = joined_at(again)
    again.wait_for(f"step {step + 4}\n")
    end_all(tmp_path, survivor, again)


@pytest.mark.parametrize(
    ("how", "status"), [("stop", 0), ("SIGTERM", 143), pytest.param("leave", 0, marks=SLOW)]
)
def test_one_that_waits_and_is_told_to_end_ends_saved_as_it_is(
    launch: Any, tmp_path: Path, how: str, status: int
) -> None:
    sites, _ = two_sites(tmp_path, launch)
    survivor = sites.launchers[0]
    ranks = ranks_of(survivor)
    sites.launchers[1].end()
    survivor.wait_for("waits for cluster(s) 1")
    (saved,) = (tmp_path / "run" / "checkpoints" / "cluster_0").glob("preempted_step*")
    if how == "SIGTERM":
        os.kill(ranks[1], signal.SIGTERM)
    else:
        told = sites.ctl(how, *(["--cluster", 0] if how == "leave" else []))
        assert told.returncode == 0, told.stdout + told.stderr
        assert "berlin (cluster 0): saved in" in told.stdout and str(saved) in told.stdout
    word = "leaving the others, told to" if how == "leave" else "told to end"
    by = how if how == "SIGTERM" else f"dsx ctl {how}"
    survivor.wait_for(f"{word} by {by} (cluster 0); saved in")
    assert (survivor.wait(60) != 0) == (status != 0), survivor.output()
    survivor.wait_for_ranks()
    if status:
        assert f"exits with return code = {status}" in survivor.output()
    manifest = json.loads((saved / "dsx.json").read_text())
    assert manifest["is_preempted"] and manifest["members"] == [0] and not manifest["has_left"]


def test_one_that_loses_the_other_at_the_end_of_training_saves_first(
    launch: Any, tmp_path: Path
) -> None:
    """It has nothing under way, and waits in `finish()` for one that is slower, and is killed."""
    sites = Sites(tmp_path, launch, NAMES)
    for path in sites.configs:
        config = json.loads(path.read_text())
        method = {"preset": "diloco", "schedule": {"interval": 2}, "delay": {}, "fragments": {}}
        config["dsx"].update(method)
        path.write_text(json.dumps(config))
    fast, slow = (
        sites.start_one(m, "first", "--steps", 3, step_seconds=seconds)
        for m, seconds in enumerate((0.1, 10.0))
    )
    fast.wait_for("step 3\n", 180)
    slow.end()
    fast.wait_for("waits for cluster(s) 1")
    (saved,) = (tmp_path / "run" / "checkpoints" / "cluster_0").glob("preempted_step*")
    manifest = json.loads((saved / "dsx.json").read_text())
    assert manifest["step"] == 3 and manifest["members"] == [0] and not manifest["is_finished"]
    told = sites.ctl("stop")
    assert told.returncode == 0, told.stdout + told.stderr
    assert fast.wait(60) == 0, fast.output()
