"""`dsx ctl` with real launchers: three sites of two ranks each, told things while they train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.files import SavedRank, rank_file
from tests.installed import needs
from tests.launch.sites_of_three import NAMES, Sites
from tests.launch.test_launch import launch

pytestmark = [needs("deepspeed"), pytest.mark.ci, pytest.mark.timeout(600)]
__all__ = ["launch"]


def test_status_save_set_and_stop_of_three_sites(launch: Any, tmp_path: Path) -> None:
    """What is asked for is done at one step by all; who is lost is told."""
    sites = Sites(tmp_path, launch)
    clusters = sites.start("run", "--steps", 1000)
    for cluster in clusters:
        cluster.wait_for("step 5\n", 180)
    told = sites.ctl("status", "--json", at=2)
    assert told.returncode == 0, told.stderr
    answers = json.loads(told.stdout)["clusters"]
    assert [answers[str(m)]["state"] for m in range(3)] == ["training"] * 3, told.stdout
    assert all(answers[str(m)]["step"] >= 5 for m in range(3))
    assert {str(answers[str(m)]["members"]) for m in range(3)} == {"[0, 1, 2]"}
    assert len({answers[str(m)]["coordinator"] for m in range(3)}) == 1
    print(sites.ctl("status").stdout)

    done = sites.ctl("save", at=2)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    step = int(done.stdout.split("all clusters save at step ")[1].split()[0])
    for m, name in enumerate(NAMES):
        folder = tmp_path / "run" / "checkpoints" / f"cluster_{m}" / f"asked_step{step}"
        assert f"{name} (cluster {m}): saved in" in done.stdout and (folder / "dsx.json").is_file()
        assert json.loads((folder / "dsx.json").read_text())["step"] == step
        said = f"all clusters save at step {step}, as rome has asked (dsx ctl)"
        assert said in clusters[m].output()
    refused = sites.ctl("set", "clusters.deadline_seconds", 5)
    assert refused.returncode == 2
    assert "these can: schedule.interval, outer_optimizer.lr" in refused.stderr, refused.stderr
    changed = sites.ctl("set", "outer_optimizer.lr", 0.3, at=1)
    assert changed.returncode == 0, changed.stdout + changed.stderr
    at = int(changed.stdout.split("all clusters set outer_optimizer.lr 0.3 at step ")[1].split()[0])
    for cluster in clusters:
        assert f"step {at}: outer_optimizer.lr=0.3 from here on" in cluster.output()
    clusters[2].end()
    clusters[1].wait_for("cluster 2 is lost: going on with")
    told = sites.ctl("status", at=1)
    assert "lost: " in told.stdout or "out: " in told.stdout, told.stdout
    assert "of clusters 0, 1;" in told.stdout
    print(told.stdout)
    done = sites.ctl("stop")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    for cluster in clusters[:2]:
        assert cluster.wait() == 0, cluster.output()
        assert "told to end by dsx ctl stop (cluster 0); saved in" in cluster.output()
    last = int(done.stdout.split("all clusters stop at step ")[1].split()[0])
    manifests = [
        tmp_path / "run" / "checkpoints" / f"cluster_{m}" / f"preempted_step{last}" / "dsx.json"
        for m in range(2)
    ]
    assert [json.loads(path.read_text())["step"] for path in manifests] == [last] * 2
    orders = [
        (one["do"], one["by"], one["step"])
        for one in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if one.get("kind") == "order"
    ]
    assert orders == [("save", "rome", step), ("set", "oslo", at), ("stop", "berlin", last)]
    saved = {str(SavedRank(rank_file(path.parent, 0)).meta["history"]) for path in manifests}
    assert len(saved) == 1 and "'changed': {'outer_optimizer.lr': 0.3}" in saved.pop()
    over = sites.ctl("status", "--seconds", 2)
    assert over.returncode == 1 and "nobody answers within 2 s" in over.stderr, over.stderr
