"""A traced run of two clusters over gloo, against its own records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.telemetry.trace.parts import trace_path
from tests.distributed import run_distributed
from tests.telemetry.trace.runs import NUM_STEPS, lines, records, train_traced_or_not
from tests.telemetry.trace.test_command import require_nesting

CASES = ("streaming_diloco", "eager")
Run = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("runs")
    return directory, run_distributed(train_traced_or_not, 2, str(directory))


def spans_of(run: Run, case: str, cluster: int) -> list[dict[str, Any]]:
    return records(trace_path(run[0] / case, cluster, 0))


@pytest.mark.parametrize("case", CASES)
def test_a_trace_changes_nothing(run: Run, case: str) -> None:
    for rank in run[1]:
        traced, plain = rank[case]
        assert traced == plain
    assert not list((run[0] / f"{case}_off").glob("trace*"))


@pytest.mark.parametrize("cluster", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_every_transfer_is_there_with_its_bytes(run: Run, case: str, cluster: int) -> None:
    name = "metrics.jsonl" if cluster == 0 else "metrics.cluster_1.jsonl"
    syncs = [r for r in lines(run[0] / case / name) if r["kind"] == "sync"]
    spans = spans_of(run, case, cluster)
    assert len(syncs) >= 3
    assert len([s for s in spans if s["name"] == "transfer"]) == len(syncs)
    for sync in syncs:
        applied = sync["applied_step"]
        own = [
            s
            for s in spans
            if (s.get("fragment"), s.get("launched")) == (sync["fragment"], sync["launched_step"])
        ]
        found = {s["name"]: s for s in own}
        rounds = [s for s in own if "round" in s]
        assert [s["round"] for s in rounds] == list(range(len(rounds)))
        assert [s["name"] for s in rounds[:2]] == ["handshake", "codes"]
        assert sum(s["bytes"] for s in rounds) == sync["bytes_sent"]
        assert found["transfer"]["bytes"] == found["apply"]["bytes"] == sync["bytes_sent"]
        assert found["launch"]["step"] == sync["launched_step"]
        assert found["apply"]["step"] == applied
        (wait,) = [
            s
            for s in spans
            if s["name"] == "wait" and (s["fragment"], s["step"]) == (sync["fragment"], applied)
        ]
        assert sync["wait_seconds"] * 1e6 - 2 <= wait["duration_us"]
        assert wait["duration_us"] <= found["apply"]["duration_us"]
        end = found["launch"]["start_us"] + found["launch"]["duration_us"]
        assert end <= found["apply"]["start_us"]
        assert found["transfer"]["start_us"] >= found["launch"]["start_us"]


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_forward_backward_and_optimizer(run: Run, case: str) -> None:
    names = [(s["name"], s["step"]) for s in spans_of(run, case, 0)]
    for step in range(1, NUM_STEPS + 1):
        for name in ("forward", "backward", "optimizer step"):
            assert names.count((name, step)) == 1, (name, step)


@pytest.mark.parametrize("case", CASES)
def test_the_command_takes_it(run: Run, case: str) -> None:
    result = CliRunner().invoke(app, ["trace", str(run[0] / case)])
    assert result.exit_code == 0, result.output
    document = json.loads((run[0] / case / "trace.json").read_text())
    complete = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == sum(len(spans_of(run, case, m)) for m in (0, 1))
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in complete)
    require_nesting(complete)
    arrows = [e["ph"] for e in document["traceEvents"] if e["ph"] in "stf"]
    assert arrows.count("s") == arrows.count("t") == arrows.count("f") > 0
