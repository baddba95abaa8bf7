"""The directory of a run of 2317291 is still read: by `dsx report`, `plan --from-run` and `trace`.

Two clusters, 40 steps of streaming DiLoCo in three fragments with int4, traced in steps 9 to 12;
made by `fixtures.py`. What is printed is compared with the records themselves.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_2317291"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A copy, as the commands write figures beside the records."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "run"))


def dsx(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def records(kind: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (FIXTURE / name).read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def test_report(run_dir: Path) -> None:
    printed = dsx("report", str(run_dir))
    losses = [record["loss"] for record in records("step")]
    assert len(losses) == 40
    assert f"{sum(losses[-10:]) / 10:.3f}" in printed
    (finish,) = records("finish")
    assert f"{finish['bytes_sent'] / 1e3:.1f}".rstrip("0").rstrip(".")[:3] in printed
    validation = json.loads((FIXTURE / "summary.json").read_text())["val_loss_clusters"]
    assert all(f"{loss:.4f}" in printed for loss in validation)
    assert (run_dir / "plot.png").stat().st_size > 10_000


def test_plan_starts_from_it(run_dir: Path) -> None:
    found = json.loads(dsx("plan", "--from-run", str(run_dir), "--gbps", "1", "--json"))
    (start,) = records("start")
    shapes = [shape for fragment in start["parameters"] for shape in fragment.values()]
    numel = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)
    assert (found["num_clusters"], found["parameters"]) == (2, numel)
    assert found["candidates"]


def test_trace(run_dir: Path) -> None:
    out = run_dir / "out.json"
    printed = dsx("trace", str(run_dir), "--out", str(out))
    assert "steps 9 to 12" in printed
    names = {event["name"] for event in json.loads(out.read_text())["traceEvents"]}
    assert {"forward", "backward"} <= names
