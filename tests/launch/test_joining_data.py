"""A cluster that comes back reads on where the others are, at their rate; other settings end it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs
from tests.launch.numbered import require_read_as_due
from tests.launch.sites_of_three import Sites
from tests.launch.test_elastic_engines import PATIENCE, go_and_come_back
from tests.launch.test_launch import launch

pytestmark = [needs("deepspeed"), pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["launch"]
SCRIPT = "train_with_data.py"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_reads_and_learns_as_at_that_step(launch: Any, tmp_path: Path, stage: int) -> None:
    """Nothing is read twice; what it would have read while it was gone is left out."""

    def change(sites: Sites) -> None:
        sites.change_engine("zero_optimization", stage=stage)

    told = go_and_come_back(launch, tmp_path, SCRIPT, victim=2, change=change)
    require_read_as_due(told, micro_batch=3, replicas=2)
    for one in told:
        assert one["lr"] == pytest.approx(0.01 / (1 + one["step"]))


def test_other_settings_and_another_model_are_refused(launch: Any, tmp_path: Path) -> None:
    sites = Sites(tmp_path, launch, script=Path(__file__).with_name(SCRIPT))
    sites.change("fragments", num_fragments=2)
    given = ["--out", tmp_path / "end", "--stop-file", tmp_path / "stop"]
    clusters = sites.start("first", *given)
    for cluster in clusters:
        cluster.wait_for("step 8\n", PATIENCE)
    clusters[2].end()
    for cluster in clusters[:2]:
        cluster.wait_for("cluster 2 is lost: going on with clusters 0, 1", PATIENCE)
    other = sites.start_one(2, "other_rate", *given, "--rate", 0.02)
    assert other.wait(PATIENCE) == 1
    assert "clusters train differently: " in other.output()
    assert "optimizer.lr[0]: cluster 0 has 0.01, cluster 2 has 0.02;" in other.output()
    other = sites.start_one(2, "other_model", *given, "--hidden", 7)
    assert other.wait(PATIENCE) == 1
    assert "clusters do not match at fragments" in other.output()
    for cluster in clusters[:2]:
        assert "is healing" not in cluster.output() and "is back" not in cluster.output()
    again = sites.start_one(2, "again", *given)
    again.wait_for("has joined the run at step", PATIENCE)
    (tmp_path / "stop").touch()
    for cluster in [*clusters[:2], again]:
        assert cluster.wait(PATIENCE) == 0, cluster.output()
