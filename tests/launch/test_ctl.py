"""`dsx ctl` with real launchers: three sites of two ranks each, told things while they train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs
from tests.launch.sites_of_three import Sites
from tests.launch.test_launch import launch

pytestmark = [needs("deepspeed"), pytest.mark.ci]
__all__ = ["launch"]


def test_the_status_of_three_sites(launch: Any, tmp_path: Path) -> None:
    sites = Sites(tmp_path, launch)
    clusters = sites.start("run", "--steps", 1000)
    for cluster in clusters:
        cluster.wait_for("step 5\n")
    told = sites.ctl("status", "--json", at=2)
    assert told.returncode == 0, told.stderr
    answers = json.loads(told.stdout)["clusters"]
    assert [answers[str(m)]["state"] for m in range(3)] == ["training"] * 3, told.stdout
    assert all(answers[str(m)]["step"] >= 5 for m in range(3))
    assert {str(answers[str(m)]["members"]) for m in range(3)} == {"[0, 1, 2]"}
    assert len({answers[str(m)]["coordinator"] for m in range(3)}) == 1
    print(sites.ctl("status").stdout)
    clusters[2].end()
    clusters[1].wait_for("cluster 2 is lost: going on with")
    told = sites.ctl("status", at=1)
    assert "lost: " in told.stdout or "out: " in told.stdout, told.stdout
    assert "of clusters 0, 1;" in told.stdout
    print(told.stdout)
    for cluster in clusters[:2]:
        cluster.end()
    over = sites.ctl("status", "--seconds", 2)
    assert over.returncode == 1 and "nobody answers within 2 s" in over.stderr, over.stderr
