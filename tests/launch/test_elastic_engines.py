"""A cluster of a pipeline, or of Megatron, is killed: the others go on; started again, it joins."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs
from tests.launch.sites_of_three import Sites
from tests.launch.test_launch import launch

pytestmark = needs("deepspeed")
CI, SLOW = pytest.mark.ci, pytest.mark.slow
__all__ = ["launch"]


def told_by(out: Path, clusters: list[int]) -> list[dict[str, Any]]:
    """What clusters have told at the end, which each has of all."""
    (everyone,) = {Path(f"{out}.{m}").read_text() for m in clusters}
    told = json.loads(everyone)
    assert [one["cluster"] for one in told] == clusters
    assert len({(one["checksum"], one["step"]) for one in told}) == 1
    return told


def carry_on(
    launch: Any, folder: Path, script: str, *args: Any, victim: int = 0
) -> tuple[Sites, list[dict[str, Any]]]:
    """Kill one of three; return what the others tell at the end."""
    sites = Sites(folder, launch, script=Path(__file__).with_name(script))
    sites.change("fragments", num_fragments=2)  # of each stage
    given = ["--out", folder / "end", "--stop-file", folder / "stop", *args]
    clusters = sites.start("first", *given)
    for cluster in clusters:
        cluster.wait_for("step 8\n", 120)
    clusters[victim].end()
    others = [m for m in range(3) if m != victim]
    named = ", ".join(map(str, others))
    for m in others:
        clusters[m].wait_for(f"cluster {victim} is lost: going on with clusters {named}")
    at = clusters[others[0]].output().count("\nstep ")
    clusters[others[0]].wait_for(f"step {at + 10}\n")
    (folder / "stop").touch()
    for m in others:
        assert clusters[m].wait(120) == 0, clusters[m].output()
    return sites, told_by(folder / "end", others)


@CI
def test_of_three_pipelines_two_go_on(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = carry_on(launch, tmp_path, "train_pipeline.py")
    with capsys.disabled():
        print(f"\nlongest step, beside a usual one: {[(o['longest'], o['usual']) for o in told]}")


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="no megatron-core")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("pipeline", marks=CI),
        pytest.param("tensor", marks=SLOW),
        pytest.param("sharded", marks=SLOW),
    ],
)
def test_of_three_of_megatron_two_go_on(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    _, told = carry_on(launch, tmp_path, "train_megatron.py", "--layout", layout)
    with capsys.disabled():
        print(f"\nlongest step, beside a usual one: {[(o['longest'], o['usual']) for o in told]}")
