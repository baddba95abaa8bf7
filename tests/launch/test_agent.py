"""`dsx agent` over real launchers: two sites come back by themselves, one of three leaves."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.tags import complete_tags
from tests.distributed import free_port
from tests.installed import needs
from tests.launch.sites_of_three import Sites, ranks_of_group
from tests.launch.test_launch import Launcher, launch

pytestmark = [needs("deepspeed"), pytest.mark.ci, pytest.mark.timeout(600)]
__all__ = ["launch"]


@pytest.fixture
def made(launch: Any, tmp_path: Path) -> Generator[Any]:
    """Make sites, and end what agents have started in sessions of their own."""
    all_made: list[Sites] = []

    def make(*names: str) -> Sites:
        all_made.append(Sites(tmp_path, launch, names))
        return all_made[-1]

    yield make
    for sites in all_made:
        sites.end()


def start(launch: Any, sites: Sites, site: int, saved: Path, *options: Any, steps: int) -> Launcher:
    """Start a site's agent; its script goes on from what is saved, if anything is."""
    launcher = ["deepspeed", "--num_gpus", 2, "--master_port", free_port()]
    how = ["dsx", "agent", "--wait", 1, *options, "--", *launcher]
    return launch(
        f"agent_{sites.names[site]}", how, "--deepspeed_config", sites.configs[site], "--steps",
        steps, "--save-dir", saved, "--resume-if-saved", "--out", saved.parent / "out",
        "--step-seconds", 0.1, "--stop-file", saved.parent / "stop", "--dsx-cluster-id", site,
    )  # fmt: skip


def test_two_sites_of_which_one_is_killed_go_on_by_themselves(
    launch: Any, made: Any, tmp_path: Path
) -> None:
    sites = made("berlin", "oslo")
    agents = [start(launch, sites, m, tmp_path / "saved", steps=10_000) for m in range(2)]
    for agent in agents:
        agent.wait_for("step 8\n", 180)
    for rank in ranks_of_group(sites.configs[1]).values():  # a launcher would tell the other to end
        os.kill(rank, signal.SIGKILL)
    agents[1].wait_for("starting it again in 1 s", 120)
    agents[1].wait_for("step ", 180, behind="starting it again in 1 s")
    (tmp_path / "stop").touch()
    for agent in agents:
        assert agent.wait(120) == 0, agent.output()
    assert "cluster 0 waits for cluster(s) 1" in agents[0].output()
    told = [json.loads((tmp_path / f"out.{m}").read_text()) for m in range(2)]
    assert told[0] == told[1] and told[0][0]["step"] == told[0][1]["step"] < 10_000
    assert told[0][0]["started_at"] == 0 and told[0][1]["started_at"] >= 8  # it has joined
    assert told[0][0]["checksum"] == told[0][1]["checksum"]


def test_on_a_notice_one_of_three_leaves_and_its_checkpoint_is_copied(
    launch: Any, made: Any, tmp_path: Path
) -> None:
    sites = made("berlin", "oslo", "rome")
    sites.change("clusters", leave_after_seconds=1.0)
    notice, saved = tmp_path / "notice", tmp_path / "saved"
    options = ["--notice", f"cat {notice} 2>/dev/null", "--notice-every", 0.5,
               "--checkpoints", saved, "--to", f"file://{tmp_path}/bucket"]  # fmt: skip
    agents = [start(launch, sites, m, saved, *(options if m == 2 else []), steps=1000)
              for m in range(3)]  # fmt: skip
    for agent in agents:
        agent.wait_for("step 8\n", 180)
    notice.write_text("terminate")
    assert agents[2].wait(120) == 143, agents[2].output()
    assert "the others go on without this cluster" in agents[2].output()
    for agent in agents[:2]:
        agent.wait_for("cluster 2 has left: going on with clusters 0, 1", 20)
    (copied,) = complete_tags(tmp_path / "bucket" / "cluster_2").values()
    assert copied["is_preempted"] and copied["has_left"]
    stopped = sites.ctl("stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    for agent in agents[:2]:
        assert agent.wait(120) == 0, agent.output()
        assert "it has done its work, or was told to stop" in agent.output()
