"""Checkpoints of a run whose clusters change: more or fewer go on, and read no sample twice."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs
from tests.launch.sites_of_three import Sites
from tests.launch.test_launch import launch

pytestmark = [needs("deepspeed"), pytest.mark.slow]
__all__ = ["launch"]
NAMES = ("berlin", "oslo", "rome", "madrid")
SECONDS = 300.0


def read_by(folder: Path, way: str, cluster: int, first: int, last: int) -> dict[int, list[int]]:
    """Return by step what all ranks of a cluster have read."""
    steps: dict[int, list[int]] = {}
    for file in sorted(folder.glob(f"{way}_read.{cluster}.*")):
        for record in map(json.loads, file.read_text().splitlines()):
            if first <= record["step"] <= last:
                steps.setdefault(record["step"], []).extend(record["samples"])
    return steps


def train(
    launch: Any, folder: Path, way: str, num_clusters: int, steps: int, *args: Any
) -> list[dict[str, Any]]:
    """Run so many clusters to a step, saving every fifth; return what they say at the end."""
    (folder / way).mkdir()
    sites = Sites(folder / way, launch, NAMES[:num_clusters])
    for path in sites.configs:
        config = json.loads(path.read_text())
        config["dsx"]["clusters"] |= {"join_deadline_seconds": SECONDS, "deadline_seconds": SECONDS}
        path.write_text(json.dumps(config))
    for one in sites.start(
        way, "--steps", steps, "--save-dir", folder / "saved", "--out", folder / f"{way}_out",
        "--reads", folder / f"{way}_read", *args,
    ):  # fmt: skip
        assert one.wait(SECONDS) == 0, one.output()
    (told,) = {(folder / f"{way}_out.{m}").read_text() for m in range(num_clusters)}
    return json.loads(told)


@pytest.mark.timeout(1000)
def test_three_are_four_and_then_two(launch: Any, tmp_path: Path) -> None:
    train(launch, tmp_path, "three", 3, 12)
    four = train(launch, tmp_path, "four", 4, 22, "--resume")
    two = train(launch, tmp_path, "two", 2, 30, "--resume")
    for told, began in ((four, 10), (two, 20)):
        assert {one["started_at"] for one in told} == {began}
        assert len({one["checksum"] for one in told}) == 1
    counted: Counter[int] = Counter()
    for way, num_clusters, first, last in (
        ("three", 3, 1, 10), ("four", 4, 11, 20), ("two", 2, 21, 30),
    ):  # fmt: skip
        for cluster in range(num_clusters):
            steps = read_by(tmp_path, way, cluster, first, last)
            assert {*steps} == {*range(first, last + 1)}
            counted.update(sample for samples in steps.values() for sample in samples)
    uncommitted = {  # of those who are gone, since the launches that were committed at the save
        sample
        for cluster in (2, 3)
        for samples in read_by(tmp_path, "four", cluster, 13, 20).values()
        for sample in samples
    }
    assert {sample for sample, times in counted.items() if times > 1} <= uncommitted
    assert max(counted.values()) <= 2


@pytest.mark.timeout(1000)
def test_what_two_save_while_the_third_heals_all_go_on_from(launch: Any, tmp_path: Path) -> None:
    """It is killed, started again, and the run ends before it has come."""
    sites = Sites(tmp_path, launch, NAMES[:3])
    sites.change("clusters", join_deadline_seconds=SECONDS, deadline_seconds=SECONDS)
    sites.change("link", heal_rate_mbit=0.005)  # some 40 s
    saves = ["--save-dir", tmp_path / "saved"]
    first = sites.start("first", "--steps", 10_000, *saves, "--reads", tmp_path / "first_read")
    for one in first:
        one.wait_for("step 11\n", SECONDS)
    first[2].end()
    for one in first[:2]:
        one.wait_for("cluster 2 is lost: going on with clusters 0, 1", SECONDS)
    again = launch(
        "again", 2, "--deepspeed_config", sites.configs[2], "--steps", 10_000, *saves,
        "--dsx-cluster-id", 2, "--step-seconds", 0.1, "--reads", tmp_path / "again_read",
    )  # fmt: skip
    first[0].wait_for("cluster 2 is healing", SECONDS)
    step = int(re.findall(r"^step (\d+)$", first[0].output(), re.MULTILINE)[-1])
    saved = 5 * (step // 5 + 2)
    for one in first[:2]:
        one.wait_for(f"saved {saved}\n", SECONDS)
    assert "has joined the run" not in again.output()
    for one in [*first[:2], again]:
        one.end()
    second = sites.start(
        "second", *saves, "--resume", "--steps", saved + 40,
        "--reads", tmp_path / "second_read", "--out", tmp_path / "out",
    )  # fmt: skip
    for one in second:
        assert one.wait(SECONDS) == 0, one.output()
    told = json.loads((tmp_path / "out.2").read_text())
    (began,) = {one["started_at"] for one in told}
    assert began >= saved and len({one["checksum"] for one in told}) == 1
    counted: Counter[int] = Counter()
    for cluster in range(3):
        for way, last in (("first", began), ("second", 10_000)):
            if (way, cluster) != ("first", 2):
                for samples in read_by(tmp_path, way, cluster, 1, last).values():
                    counted.update(samples)
    assert {*counted.values()} == {1}
    killed = [
        s for _, ranks in sorted(read_by(tmp_path, "first", 2, 1, 999).items()) for s in ranks
    ]
    is_read_again = [sample in counted for sample in killed]
    assert is_read_again == sorted(is_read_again) and {*is_read_again} == {False, True}
