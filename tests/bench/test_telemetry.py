"""`dsx bench telemetry`: what its figures are, mistakes, and a small one as it is called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.bench.free_ports import free_ports
from dsx.bench.telemetry import bench
from dsx.bench.telemetry.bench import CLOCKS, RunFailed, bounds_of_median, row_of, what_was_told
from dsx.bench.telemetry.job import RUN, Block, Job
from dsx.bench.telemetry.stub import NOTICES, SPANS, Stub
from dsx.cli import app
from tests.installed import needs

with_all = needs("prometheus_client", "opentelemetry.exporter.otlp.proto.http")
END: list[list[dict[str, Any]]] = [[{"what": "end", "missing": {}}]] * 2


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "telemetry", *arguments])


def job(folder: Path, **changes: Any) -> Job:
    return replace(
        Job(str(folder), "tcp://127.0.0.1:1", "http://127.0.0.1:2", (7, 9), ("wandb",), 2, 3, 4, 8,
            2, 16), **changes
    )  # fmt: skip


def test_what_is_added_is_by_pairs_in_whichever_order() -> None:
    on, off = Block(True, 0.012, 0.03, 0.05), Block(False, 0.010, 0.01, 0.02)
    slow_on, slow_off = Block(True, 0.024, 0.03, 0.05), Block(False, 0.020, 0.01, 0.02)
    row = row_of(1, "thread_seconds", [on, off, slow_off, slow_on, on, off])
    assert (row.cluster, row.clock, row.pairs) == (1, "thread_seconds", 3)
    assert row.off_ms == pytest.approx(10) and row.added_ms == pytest.approx(2)
    assert (row.low_ms, row.high_ms) == (pytest.approx(2), pytest.approx(4))
    assert row.percent == pytest.approx(20) and row.half_range_percent == pytest.approx(0)
    assert row_of(0, "wall_seconds", [on, off]).percent == pytest.approx(150)


def test_where_a_median_lies_is_by_how_coins_fall() -> None:
    """Of 20 values the 6th and the 15th, of 6 the outermost, of fewer no less than all."""
    values = [float(n) for n in range(1, 21)]
    assert bounds_of_median(values[::-1]) == (6, 15)
    assert bounds_of_median(values[:6]) == (1, 6)
    assert bounds_of_median(values[:3]) == (1, 3)


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    own = job(tmp_path)
    own.write()
    assert Job.read(tmp_path) == own
    on, off = (own.dsx(1, is_on)["dsx"] for is_on in (True, False))
    assert on["metrics"]["prometheus"] == "127.0.0.1:8"  # the port is that and the cluster's number
    assert off["metrics"] == {"progress_seconds": 0.0}
    assert {**on, "metrics": 0} == {**off, "metrics": 0}


def tell_all(own: Job, stub: Stub) -> None:
    run = Path(own.directory) / RUN
    (run / "wandb").mkdir(parents=True)
    for cluster, name in enumerate(("metrics.jsonl", "metrics.cluster_1.jsonl")):
        (run / name).write_text('{"kind": "step"}\n' * own.steps_told)
        (run / f"trace.cluster_{cluster}").write_text("x")
        (run / "wandb" / f"cluster_{cluster}").touch()
        stub.pages_read[own.pages[cluster]] += 4
    stub.received.update({SPANS: 5, NOTICES: 1})


@pytest.mark.parametrize(
    "lacks", ["metrics.jsonl", "trace.cluster_1", "wandb/cluster_0", SPANS, NOTICES, "page", "disk"]
)
def test_what_was_not_told_makes_no_figure(tmp_path: Path, lacks: str) -> None:
    own, stub = job(tmp_path), Stub((7, 9))
    tell_all(own, stub)
    assert what_was_told(own, stub, END)[0] == "9 steps in metrics.jsonl"
    ends = END
    if lacks == "page":
        stub.pages_read[9] = 0
    elif lacks == "disk":
        ends = [*END[:1], [{"what": "end", "missing": {"metrics.jsonl": 3}}]]
    elif lacks in stub.received:
        stub.received[lacks] = 0
    else:
        (tmp_path / RUN / lacks).unlink()
    with pytest.raises(RunFailed, match="not all was told, so nothing is measured"):
        what_was_told(own, stub, ends)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--pairs 1", "pairs=1 must be 2 to 1000"),
        ("--steps 0", "steps=0 must be 1 to 10000"),
        ("--interval 18", "interval=18 must be a multiple of 4, for 4 fragments"),
        ("--rows 0", "rows=0 must be 1 to 1000000"),
        ("--to wandb,x", "--to has 'x'; it takes none, or of wandb, mlflow, tensorboard"),
        ("--json no/such/file", "there is no such directory"),
    ],
)
def test_mistakes_are_named(wrong: str, said: str) -> None:
    done = call(*wrong.split())
    assert done.exit_code == 2 and said in done.output and done.output.count("\n") == 1


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_is_installed", lambda module: module != "prometheus_client")
    done = call()
    assert done.exit_code == 2
    assert 'prometheus_client is not installed: pip install "dsx-train[prometheus]"' in done.output


def test_a_process_that_ends_by_an_error_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_POLL_SECONDS", 0.01)
    (port,) = free_ports(1)
    own = job(tmp_path, rendezvous=f"tcp://127.0.0.1:{port}", width=-1)
    own.write()
    with pytest.raises(RunFailed, match=r"cluster \d has ended with 1: (.|\n)*negative"):
        bench._run(own, 120, lambda line: None)


@pytest.mark.ci
@with_all
@pytest.mark.timeout(600)
def test_a_small_one(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = "--pairs 3 --steps 20 --layers 4 --width 64 --rows 16 --interval 8 --to none"
    done = call(*sizes.split(), "--json", str(out))
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [(row["cluster"], row["clock"]) for row in found["rows"]] == [
        (cluster, clock) for cluster in (0, 1) for clock in CLOCKS
    ]
    for blocks in found["blocks"]:
        assert [block["is_on"] for block in blocks] == [True, False, False, True, True, False]
        assert all(0 < b["thread_seconds"] <= b["process_seconds"] for b in blocks)
    for row in found["rows"]:
        assert row["off_ms"] > 0 and row["low_percent"] <= row["percent"] <= row["high_percent"]
        assert row["low_ms"] <= row["added_ms"] <= row["high_ms"]
        assert f"{row['added_ms']:.2f} [{row['low_ms']:.2f}" in done.output
    assert found["told"][0] == "80 steps in metrics.jsonl"
    assert "with everything on: 80 steps in metrics.jsonl, traces of" in done.output
