"""`dsx simulate`, as it is called."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app

MODEL = ["--params", "1e9", "--layers", "24", "--step-seconds", "0.1"]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *MODEL, *arguments])


def answer(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("method", "published"),
    [
        ("data_parallel", [86.8, 152.6, 184.2, 222.3, 569.0]),
        ("streaming", [1.4, 5.2, 9.1, 16.0, 28.1]),
    ],
)
def test_the_machine_interface(method: str, published: list[float]) -> None:
    command = (
        f"--method {method} --interval 100 --overlap-steps 0 --layers-per-fragment 3 --bits 16.2 "
        "--clusters 2 --targets 50,80,90,95,99 --paper-grid"
    )
    assert answer(*command.split())["min_gbps"] == published


def test_a_line_in_place_of_targets() -> None:
    found = answer("--method", "diloco", "--interval", "100", "--bits", "16", "--gbps", "1.6")
    assert found["bytes_per_round"] == 2e9
    assert found["exposed_seconds"] == pytest.approx(10.0, rel=0.01)
    assert found["utilization"] == pytest.approx(0.5, rel=0.01)
    seconds = found["compute_seconds"] + found["exposed_seconds"]
    assert found["utilization"] == pytest.approx(found["compute_seconds"] / seconds)
    assert found["bytes_per_day"] == pytest.approx(2e9 * 86400 / seconds)


@pytest.mark.parametrize("method", ["data_parallel", "wfbp", "diloco", "streaming"])
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_one_machine_interface_for_all_methods(method: str, overlap: str) -> None:
    how = f"--method {method} --interval 100 --overlap-steps {overlap} --layers-per-fragment 3"
    needed = answer(*how.split(), "--targets", "50,90", "--paper-grid")
    line = ["--targets", "50,90", "--paper-grid", "--gbps", "1.6"]
    given = answer(*how.split(), *line)
    assert "gbps" in given and "min_gbps" not in given
    assert given == answer(*how.split(), "--gbps", "1.6")
    is_said = [bool(found["remarks"]) for found in (needed, given)]
    assert is_said == [method in ("data_parallel", "wfbp") and overlap == "1"] * 2
    text = call(*how.split(), "--gbps", "1.6").stdout
    assert ("waits for every transfer, so --overlap-steps 1 changes nothing" in text) == is_said[0]


def test_data_parallel_overlaps_with_no_further_step() -> None:
    how = ["--method", "data_parallel", "--gbps", "100"]
    found = answer(*how, "--overlap-steps", "1")
    assert found.pop("remarks") and found | {"remarks": []} == answer(*how)


def test_both_questions_agree() -> None:
    how = ["--method", "streaming", "--overlap-steps", "2", "--latency-seconds", "0.05"]
    how += ["--codec-seconds-per-byte", "1e-10", "--clusters", "4", "--granularity", "fragment"]
    for target in (50, 90, 98):
        (gbps,) = answer(*how, "--targets", str(target))["min_gbps"]
        found = answer(*how, "--gbps", str(gbps))
        assert found["utilization"] == pytest.approx(target / 100, rel=1e-4)


def test_what_no_line_gives_is_said() -> None:
    how = ["--method", "data_parallel", "--latency-seconds", "0.1"]
    found = answer(*how, "--targets", "40,90")
    assert found["min_gbps"][0] > 0
    assert found["min_gbps"][1] is None
    assert "50.00 % on a line of any bandwidth" in found["notes"][1]
    grid = answer(*how, "--targets", "0.01,90", "--paper-grid")
    assert grid["min_gbps"] == [None, None]
    assert "first point" in grid["notes"][0]
    assert "last point" in grid["notes"][1]


def test_tables_name_what_they_show() -> None:
    table = call("--method", "streaming", "--targets", "80,99.5").stdout
    for part in ("1e+09 parameters, 24 layers", "one of 8 fragments every 12", "99.5 %", "Gbit/s"):
        assert part in table
    line = call("--method", "streaming", "--gbps", "1").stdout
    for part in ("on a line of 1 Gbit/s", "utilization", "2 GB", "of that exposed"):
        assert part in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--method gossip", "method='gossip' is not known; allowed: 'data_parallel'"),
        ("--method diloco --interval 0", "interval=0 must be 1 to"),
        ("--method diloco --overlap-steps -1", "overlap_steps=-1 must be 0 to"),
        ("--method diloco --overlap-steps 101", "overlap_steps=101 must be 0 to 100"),
        ("--method data_parallel --overlap-steps -1", "overlap_steps=-1 must be 0 to"),
        ("--method streaming --layers-per-fragment 25", "must be 1 to 24"),
        ("--method streaming --pattern zigzag", "pattern='zigzag' is not known"),
        ("--method diloco --pattern sequential", "goes with method streaming"),
        ("--method diloco --launch-every 3", "goes with method streaming"),
        ("--method diloco --granularity bit", "allowed: 'layer', 'fragment'"),
        ("--method wfbp --granularity fragment", "sends while the backward goes on"),
        ("--method wfbp --layers-per-fragment 25", "must be 1 to 24"),
        ("--method diloco --clusters 1", "clusters=1 must be 2 to"),
        ("--method diloco --bits 0", "bits=0 must be"),
        ("--method diloco --bits nan", "bits=nan must be"),
        ("--method diloco --params inf", "params=inf must be 1 to 1e+15"),
        ("--method diloco --step-seconds -1", "step_seconds=-1 must be"),
        ("--method diloco --layers 100000", "layers=100000 must be 1 to 10000"),
        ("--method diloco --latency-seconds -1", "latency_seconds=-1 must be 0 to"),
        ("--method diloco --rounds 3", "rounds=3 must be 20 to"),
        ("--method diloco --gbps 0", "gbps=0 must be"),
        ("--method diloco --targets 100", "target=100 must be a percentage above 0 and below 100"),
        ("--method diloco --targets=", "targets='' must be percentages"),
        ("--method diloco --targets 50,,80", "try 50,80,90,95,99"),
    ],
)
def test_a_mistake_is_named_and_exits_with_2(arguments: str, said: str) -> None:
    result = call(*arguments.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("dsx simulate: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("per_fragment", ["1", "3"])
def test_a_thousand_layers_and_32_clusters_take_less_than_2_seconds(per_fragment: str) -> None:
    start = time.process_time()
    answer(
        "--params", "1e11", "--layers", "1000", "--clusters", "32", "--method", "streaming",
        "--layers-per-fragment", per_fragment, "--latency-seconds", "0.05",
    )  # fmt: skip
    assert time.process_time() - start < 2
