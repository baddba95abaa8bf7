"""Records: what is written when, and what a resumed run drops."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.behind import Behind
from dsx.telemetry.metrics import Metrics, metrics_path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(directory: Path | None, metrics: Metrics, first: int, last: int) -> None:
    metrics.begin(directory, first - 1)
    for step in range(first, last + 1):
        metrics.event("sync", {"applied_step": step, "fragment": 0, "mean_norm": 2.5})
        metrics.step({"step": step, "seconds": 0.5})
        metrics.complete_step({"loss": step * 1.0})
    metrics.close()


def test_one_record_per_step_and_per_sync(tmp_path: Path) -> None:
    write_steps(tmp_path, Metrics(1), 1, 3)
    written = records(tmp_path / "metrics.cluster_1.jsonl")
    steps = [r for r in written if r["kind"] == "step"]
    syncs = [r for r in written if r["kind"] == "sync"]
    assert [(r["step"], r["loss"]) for r in steps] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [(r["applied_step"], r["mean_norm"]) for r in syncs] == [(1, 2.5), (2, 2.5), (3, 2.5)]
    assert all(r["cluster"] == 1 and r["time"] > 0 for r in written)


def test_the_time_of_a_step_is_when_it_ended(tmp_path: Path) -> None:
    metrics = Metrics(0)
    metrics.begin(tmp_path, 0)
    begun = time.time()
    metrics.step({"step": 1})
    ended = time.time()
    metrics.event("sync", {"applied_step": 1})  # as of a transfer that was told of later
    metrics.complete_step({"loss": 1.0})
    metrics.close()
    step = records(tmp_path / "metrics.jsonl")[-1]
    assert step["loss"] == 1.0
    assert begun <= step["time"] <= ended


def test_a_record_is_made_where_records_are_written(tmp_path: Path) -> None:
    behind = Behind()
    metrics = Metrics(1, behind=behind)
    metrics.writer("machine")({"step": 0})  # without a directory nothing is written
    metrics.begin(tmp_path, 0)
    metrics.step({"step": 1})
    write = metrics.writer("machine")
    metrics.flush()
    asked = threading.Event()
    behind.do(lambda: (asked.wait(10), write({"step": 1, "process_bytes": 7})), tmp_path)
    metrics.event("sync", {"applied_step": 1})
    asked.set()
    metrics.close()
    written = records(tmp_path / "metrics.cluster_1.jsonl")
    assert [r["kind"] for r in written] == ["step", "machine", "sync"]
    assert written[1]["process_bytes"] == 7 and written[1]["cluster"] == 1


def test_a_resumed_run_drops_the_steps_it_takes_again(tmp_path: Path) -> None:
    write_steps(tmp_path, Metrics(0), 1, 6)
    with metrics_path(tmp_path, 0).open("a") as file:
        file.write('{"kind": "step", "st')  # killed while writing
    metrics = Metrics(0)
    metrics.begin(tmp_path, 0)  # a handle begins before it knows that it will resume
    write_steps(tmp_path, metrics, 5, 7)
    steps = [r["step"] for r in records(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_that_goes_back_to_its_start_drops_all_but_what_was_before(tmp_path: Path) -> None:
    before = Metrics(0)
    before.begin(tmp_path, 0)
    before.event("start", {"step": 0})
    before.close()
    write_steps(tmp_path, Metrics(0), 1, 6)
    write_steps(tmp_path, Metrics(0), 1, 2)
    assert len(records(tmp_path / "metrics.jsonl")) == 5  # with the first record


def test_what_is_written_where_no_step_is_taken_drops_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, Metrics(0), 1, 6)
    metrics = Metrics(0)
    metrics.begin(tmp_path, None)
    metrics.event("validation", {"step": 4})
    metrics.close()
    assert len(records(tmp_path / "metrics.jsonl")) == 13


def test_without_a_directory_nothing_is_written() -> None:
    write_steps(None, Metrics(0), 1, 2)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    metrics = Metrics(0, ["tensorboard"])
    metrics.begin(tmp_path, 0)
    assert not (tmp_path / "tensorboard").exists()  # before it is known whose folder it is
    write_steps(tmp_path, metrics, 1, 2)
    assert list((tmp_path / "tensorboard" / "cluster_0").glob("events.*"))
