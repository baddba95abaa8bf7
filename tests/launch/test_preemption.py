"""Runs that are told to end, through the real launchers: saved, ended, and gone on with."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.tags import complete_tags
from tests.installed import needs
from tests.launch.test_launch import Launcher, launch, results, write_config  # noqa: F401

pytestmark = [needs("deepspeed"), pytest.mark.ci, pytest.mark.timeout(500)]
STEPS = 60
SLOW = ["--step-seconds", 0.1]


def configured(path: Path, run: Path, **clusters: Any) -> list[Any]:
    document = json.loads(write_config(path, **clusters).read_text())
    document["dsx"]["metrics"] = {"dir": str(run)}
    path.write_text(json.dumps(document))
    return ["--deepspeed_config", path, "--steps", STEPS]


def ranks_of(launcher: Launcher) -> dict[int, int]:
    """Return the process ids of a launcher's ranks, by rank."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if os.getpgid(int(path.parent.name)) != launcher.process.pid:
                continue
            variables = dict(
                text.split("=", 1) for text in path.read_text().split("\0") if "=" in text
            )
        except OSError:
            continue
        if "LOCAL_RANK" in variables:
            found[int(variables["LOCAL_RANK"])] = int(path.parent.name)
    return found


def undisturbed(launch: Any, tmp_path: Path, ranks: int = 4) -> list[list[dict[str, Any]]]:  # noqa: F811
    config = configured(tmp_path / "whole.json", tmp_path / "whole")
    launcher = launch("whole", ranks, *config, "--out", tmp_path / "out")
    assert launcher.wait() == 0, launcher.output()
    return results(tmp_path / "out")


def saved_steps(base: Path) -> list[int]:
    """Return the steps of the newest tags of both clusters, which are those of one end."""
    newest = []
    for cluster in range(2):
        tags = complete_tags(base / f"cluster_{cluster}")
        last = max(tags.values(), key=lambda manifest: manifest["step"])
        assert last["is_preempted"], tags
        newest.append(last["step"])
    return newest


def checksums(whole: list[list[dict[str, Any]]]) -> list[float]:
    return [cluster["checksum"] for cluster in whole[0]]


@pytest.mark.parametrize("asks", ["the launcher", pytest.param("one rank", marks=pytest.mark.slow)])
def test_one_launcher_over_all_clusters(launch: Any, tmp_path: Path, asks: str) -> None:  # noqa: F811
    whole, run = undisturbed(launch, tmp_path), tmp_path / "run"
    config = configured(tmp_path / "ds.json", run)
    launcher = launch("told", 4, *config, *SLOW)
    launcher.wait_for("step 7")
    if asks == "one rank":
        os.kill(ranks_of(launcher)[3], signal.SIGTERM)
    else:  # the runner, which ends at once and tells nobody
        launcher.process.terminate()
    told = time.monotonic()
    launcher.wait()
    launcher.wait_for_ranks()
    assert time.monotonic() - told < 15
    output = launcher.output()
    assert "told to end by SIGTERM" in output and "saved in" in output, output
    saved_steps(run / "checkpoints")
    resumed = launch(
        "resumed",
        4,
        *config,
        "--resume",
        "--save-dir",
        run / "checkpoints",
        "--out",
        tmp_path / "b",
    )
    assert resumed.wait() == 0, resumed.output()
    assert checksums(results(tmp_path / "b")) == checksums(whole)
