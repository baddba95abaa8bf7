"""`dsx bench heal`: what its figures are, mistakes, and a small one as it is called."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.bench.heal.bench import HEAL, OWN, RESTART, Row, cost, say
from dsx.bench.heal.job import Job
from dsx.bench.namespaces import TestbedUnavailable
from dsx.bench.testbed import Testbed
from dsx.cli import app


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "heal", *arguments])


def steps(*seconds: float) -> list[dict[str, Any]]:
    return [{"at": 10.0 + at, "seconds": each} for at, each in enumerate(seconds)]


def test_what_the_others_lose_is_beyond_their_usual_mean() -> None:
    before = steps(0.1, 0.3, 0.1, 0.3)
    percent, longest = cost(before, steps(0.2, 0.5, 0.2, 0.3, 9.0), 3.5)
    assert percent == pytest.approx(100 * 0.4 / 3.5)  # the fifth step is beyond the window
    assert longest == pytest.approx(0.2)
    percent, longest = cost(before, steps(0.1, 0.1), 3.0)
    assert percent == pytest.approx(-100 * 0.2 / 3.0) and longest == pytest.approx(-0.2)


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(str(tmp_path), {"num_clusters": 2}, {"port": 1}, 2, 8, 4, 0.1, 50.0, 4.0)
    job.write()
    assert Job.read(tmp_path) == job
    assert job.dsx(1)["dsx"]["link"]["heal_rate_mbit"] == 50.0
    assert job.dsx(1)["dsx"]["clusters"]["cluster_id"] == 1


def test_a_row_is_said_in_a_line() -> None:
    row = Row(OWN, 12.0, 3.0, 1.0, 2.0, 9.0, 13.0, 0.25, 0.1)
    assert say(row) == (
        "with its own checkpoint: 12.0 MB copied and 3.0 MB there in 2.0 s, back after 9.0 s, the "
        "others lost 0.25 %"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--clusters 2", "clusters=2 must be 3 to 4"),
        ("--interval 4", "interval=4 must be 8 to 10000"),
        ("--repeats 0", "repeats=0 must be 1 to 100"),
        ("--mbit 0", "mbit=0 must be 1 to 100000"),
        ("--json no/such/file", "there is no such directory"),
    ],
)
def test_a_mistake_is_one_line(wrong: str, said: str) -> None:
    result = call(*wrong.split())
    assert result.exit_code == 2
    assert said in result.output.replace(",", ""), result.output


@pytest.mark.ci
def test_a_small_one(tmp_path: Path) -> None:
    try:
        with Testbed(3, None):
            pass
    except TestbedUnavailable as error:
        pytest.skip(str(error))
    assert os.geteuid() == 0
    result = call(
        "--mbit", "100", "--layers", "2", "--width", "512", "--interval", "16", "--step-seconds",
        "0.1", "--repeats", "1", "--json", str(tmp_path / "heal.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = {row["way"]: row for row in json.loads((tmp_path / "heal.json").read_text())}
    assert set(rows) == {HEAL, OWN, RESTART}
    for way in (HEAL, OWN):
        assert rows[way]["copied_mb"] + rows[way]["held_mb"] > 2 * 512 * 512 * 8e-6 * 0.99
        assert rows[way]["wire_mb"] > rows[way]["copied_mb"]
        assert rows[way]["total_seconds"] > rows[way]["heal_seconds"] > 0
    assert rows[HEAL]["held_mb"] == 0
    assert rows[RESTART]["total_seconds"] > 0
