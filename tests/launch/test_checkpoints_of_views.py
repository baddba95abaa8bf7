"""Checkpoints of a run whose clusters change: more or fewer go on, and read no sample twice."""

from __future__ import annotations

import json
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
