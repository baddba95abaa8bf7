"""Runs that go wrong on purpose, at a size of seconds."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from dsx.bench.convergence.wrong import CASES
from dsx.cli import app
from tests.bench.corpus import build_corpus
from tests.installed import needs

pytestmark = needs("megatron")


def test_a_cluster_with_too_large_a_rate_is_warned_of(tmp_path: Path) -> None:
    number = [case.name for case in CASES].index("rate: diloco")
    out = tmp_path / "guard.jsonl"
    data = str(build_corpus(tmp_path))
    command = ["bench", "guard", "--data", data, "--json", str(out), "--steps", "48"]
    done = CliRunner().invoke(app, [*command, "--part", f"{number}/99"])
    assert done.exit_code == 0, done.output
    row = json.loads(out.read_text())
    assert row["case"] == "rate: diloco" and row["guard"]["alarms"] == {"far": 1}
    assert len(row["rounds"]) == 6 and "far 1" in done.output
