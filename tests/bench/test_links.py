"""`dsx bench links`, as it is called: what it measures, what its figures are, mistakes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.bench.kinds import KINDS
from dsx.bench.links.bench import Row, Wire, row_of, row_of_rounds
from dsx.bench.links.job import Found, Job, Passed
from dsx.bench.namespaces import TestbedUnavailable
from dsx.bench.testbed import Testbed
from dsx.cli import app

QUICK = ["--seconds", "0.2", "--repeats", "1", "--megabytes", "0.5"]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "links", *arguments])


def found(seconds: float, cpu: float, payload: int, wire: int, *steps: float) -> Found:
    alone, beside = steps[0::2], steps[1::2]
    return Found(Passed(seconds, cpu, payload, wire), alone, beside)


def test_figures_are_of_both_ends() -> None:
    one_way = [
        [found(8.0, 3.0, 10**9, 1_050_000_000, 1.0, 1.5), found(8.0, 1.0, 0, 10**7, 1.0, 1.1)],
        [found(10.0, 2.0, 10**9, 1_070_000_000, 1.0, 1.2), found(9.0, 1.0, 0, 10**7, 1.0, 1.0)],
    ]
    row = row_of(Wire(1000.0, 1), KINDS["link/curve"], one_way)
    assert (row.transport, row.security, row.line_mbit, row.ways) == ("link", "curve", 1000.0, 1)
    assert row.gbit_per_second == pytest.approx(0.9) and row.gbit_half_range == pytest.approx(0.1)
    assert row.load == "messages" and row.cpu_seconds_per_gb == pytest.approx(3.5)
    assert row.cpu_half_range == pytest.approx(0.5)
    assert row.line_percent == pytest.approx(100 * 0.9 / 0.956)
    assert row.wire_per_payload == pytest.approx(1.06)
    assert row.wire_half_range == pytest.approx(0.01)
    assert row.step_slowdown_percent == pytest.approx(20.0)
    both_ways = [[found(8.0, 1.0, 10**9, 0), found(8.0, 1.0, 10**9, 0)]]
    row = row_of(Wire(None, 2), KINDS["gloo/none"], both_ways)
    assert row.gbit_per_second == pytest.approx(1.0) and row.cpu_seconds_per_gb == pytest.approx(1)
    assert row.line_mbit is row.line_percent is row.wire_per_payload is None
    assert row.step_slowdown_percent is row.step_half_range is None


def test_rounds_tell_of_bytes_alone() -> None:
    both = [[found(2.0, 1.0, 10**6, 1_100_000), found(2.0, 1.0, 10**6, 1_080_000)]]
    row = row_of_rounds(Wire(200.0, 1), KINDS["link/curve"], both)
    assert (row.load, row.ways) == ("int4, low rank", 2)
    assert row.wire_per_payload == pytest.approx(1.09)
    assert row.gbit_per_second == pytest.approx(0.004)
    assert row.cpu_seconds_per_gb is row.line_percent is row.step_slowdown_percent is None


def test_a_job_is_read_as_it_was_written() -> None:
    job = Job(KINDS["link/curve"], ["a", "b"], [1, 2], ["x", "y"], 2, 10, 4, 0.5, 1, "lo", 60.0)
    assert Job.read(job.write()) == job
    first, second = job.way(0), job.way(1)
    assert first.link is not None and second.link is not None
    assert first.link.members == second.link.members == ("first=a:1", "second=b:2")
    assert (second.link.keys, second.link.port, second.security) == ("y", 2, "curve")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--lines 200x3", "--lines has '200x3': write loopback or Mbit/s"),
        ("--lines loop", "--lines has 'loop': write loopback or Mbit/s"),
        ("--kinds gloo/curve", "--kinds has 'gloo/curve'; it takes gloo/none, link/none"),
        ("--seconds 0", "seconds=0 must be 0.01 to 600"),
        ("--repeats 0", "repeats=0 must be 1 to 100"),
        ("--megabytes 900", "megabytes=900 must be 0.001 to 500"),
        ("--json no/such/file", "there is no such directory"),
    ],
)
def test_mistakes_are_answered_before_anything_is_measured(wrong: str, said: str) -> None:
    result = call(*wrong.split())
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_without_namespaces_it_ends_with_77(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = call("--lines", "200x2", *QUICK)
    assert result.exit_code == 77 and "no testbed" in result.output


@pytest.mark.ci
def test_kinds_take_turns_on_loopback(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    result = call("--lines", "loopback", "--kinds", "gloo/none,link/curve", *QUICK,
                  "--json", str(path))  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = [Row(**row) for row in json.loads(path.read_text())]
    assert [(row.transport, row.security) for row in rows] == [("gloo", "none"), ("link", "curve")]
    for row in rows:
        assert row.line_mbit is None and row.line_percent is None and row.repeats == 1
        assert row.cpu_seconds_per_gb is not None and 0.01 < row.cpu_seconds_per_gb < 100
        assert 0.01 < row.gbit_per_second < 1000
        assert row.step_slowdown_percent is not None and row.step_slowdown_percent > -60
    assert "link/curve" in result.output


@pytest.mark.ci
def test_a_throttled_line_bounds_what_passes(tmp_path: Path) -> None:
    try:
        with Testbed(2, None):
            pass
    except TestbedUnavailable as error:
        pytest.skip(f"no testbed here: {error}")
    path = tmp_path / "links.json"
    more = ["--training-windows", "0", "--json", str(path), "--seconds", "2"]
    result = call("--lines", "40x2", "--kinds", "link/curve", "--rounds", "5", *QUICK, *more)
    assert result.exit_code == 0, result.output
    row, of_rounds = [Row(**row) for row in json.loads(path.read_text())]
    assert row.line_mbit == 40.0 and row.ways == 2 and row.step_slowdown_percent is None
    assert row.line_percent is not None and 70 < row.line_percent < 110
    assert row.wire_per_payload is not None and 1.04 < row.wire_per_payload < 1.15
    assert of_rounds.load == "int4, low rank" and of_rounds.wire_per_payload is not None
    assert 1.05 < of_rounds.wire_per_payload < 1.15
