"""A cluster more than a run began with is refused, and those that train take no notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs
from tests.launch.sites_of_three import NAMES, Sites
from tests.launch.test_launch import launch

pytestmark = [needs("deepspeed"), pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["launch"]


def test_a_fourth_of_three_is_refused(launch: Any, tmp_path: Path) -> None:
    """Its key lies in the folders of all, and is of none of the run's members."""
    sites = Sites(tmp_path, launch, names=(*NAMES, "paris"))
    for path in sites.configs[:3]:
        config: dict[str, Any] = json.loads(path.read_text())
        config["dsx"]["clusters"]["num_clusters"] = 3
        config["dsx"]["link"]["members"] = config["dsx"]["link"]["members"][:3]
        path.write_text(json.dumps(config))
    sites.change("clusters", join_deadline_seconds=30)
    given = ["--steps", 10_000, "--stop-file", tmp_path / "stop"]
    clusters = [sites.start_one(m, "first", *given) for m in range(3)]
    for cluster in clusters:
        cluster.wait_for("step 8\n", 240)
    more = sites.start_one(3, "more", *given)
    assert more.wait(240) == 1
    assert "no link to cluster 0, rank 0: it does not take this cluster's key" in more.output()
    (tmp_path / "stop").touch()
    for cluster in clusters:
        assert cluster.wait(240) == 0, cluster.output()
        assert "is lost" not in cluster.output() and "is healing" not in cluster.output()
