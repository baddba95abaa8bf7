"""`dsx bench gpu`: what it refuses, how it judges, and the whole of it on the CPU."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dsx.bench.gpu import checks, sync_watch
from dsx.bench.gpu.factors import on
from dsx.bench.gpu.job import SHORT, Job, Seen
from dsx.bench.gpu.table import Row, as_markdown
from dsx.cli import app
from dsx.compress.factor_products import SideProducts
from dsx.config.schema import PRESETS, preset
from dsx.core.host_numbers import HostNumbers
from tests.compress.side_streams import on_the_side

JOB = Job("torch", "diloco")
GOOD = Seen([6.0, 5.0, 2.0, 2.0, 2.0, 2.0], "a", "nccl", {}, 100, 100, 0.1, 0.0, 0.0, 8)


def run_cli(*arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it has said."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "500", "TERM": "dumb"})
    return done.exit_code, done.output


def judged(*changes: dict[str, Any], job: Job = JOB) -> tuple[str, str]:
    """Two clusters of one rank, each GOOD but for its changes."""
    return checks._judge(job, [[{**asdict(GOOD), **of_one}] for of_one in changes])


def test_every_preset_has_a_form_that_trains_some_rounds() -> None:
    assert set(SHORT) == set(PRESETS)
    for name, overrides in SHORT.items():
        preset(name, 2, **overrides)


def test_what_is_right_is_ok() -> None:
    told, outcome = judged({}, {})
    assert outcome == "ok"
    assert "loss 6.00 to 2.00" in told and "8 rounds" in told and "nccl inside" in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"average": "b"}, "averages of rank 0 differ"),
        ({"losses": [6.0] * 6}, "loss 6.00 to 4.00"),
        ({"losses": [6.0, float("nan"), 2.0, 2.0, 2.0, 2.0]}, "loss"),
        ({"syncs": {"outer/loop.py:3": 7}}, "waits for the device at outer/loop.py:3 (7)"),
    ],
)
def test_what_is_not_fails_and_is_told(changes: dict[str, Any], said: str) -> None:
    told, outcome = judged({}, changes)
    assert outcome == "failed" and said in told


def test_memory_off_the_plan_fails_and_a_run_without_rounds() -> None:
    assert judged({"given_bytes": 106}, {})[1] == "failed"
    assert judged({"num_rounds": 0}, {})[1] == "failed"


def test_launches_that_have_to_wait_are_told_and_right() -> None:
    waits = {"syncs": {"outer/attempt.py:1": 2}}
    for job in (
        Job("torch", "cocktail_sgd"),
        Job("torch", "diloco", state="host"),
    ):
        told, outcome = judged(waits, {}, job=job)
        assert outcome == "ok" and "waits for the device" in told


def test_the_table_counts_and_escapes() -> None:
    rows = [Row("trains", "a", "b", "c | d\ne", "ok"), Row("x", "y", "z", "", "not run")]
    text = as_markdown(rows, "One GPU.")
    assert "| trains | a | b | c \\| d e | ok |" in text
    assert text.endswith("1 ok, 0 failed, 1 not run, 0 seen\n")


def test_without_a_gpu_and_with_wrong_names_it_says_what_to_do(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    if not torch.cuda.is_available():
        status, told = run_cli("bench", "gpu", "--out", out)
        assert status and "no GPU that torch can use; --on-cpu" in told
    status, told = run_cli("bench", "gpu", "--only", "speed", "--out", str(tmp_path / "b"))
    assert status and "--only has 'speed'; it takes copies" in told
    status, told = run_cli("bench", "gpu", "--engines", "jax", "--out", str(tmp_path / "c"))
    assert status and "--engines has 'jax'; it takes torch" in told
    (tmp_path / "file").touch()
    status, told = run_cli("bench", "gpu", "--on-cpu", "--out", str(tmp_path))
    assert status and "holds files already" in told


def test_numbers_of_a_record_are_read_as_they_are_on_the_host() -> None:
    record = {"fragment": 3, "norm": torch.tensor(1.5), "name": "x", "none": None}
    numbers = HostNumbers(record)
    assert numbers.are_there
    assert numbers.read() == {"fragment": 3, "norm": 1.5, "name": "x", "none": None}


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("deepspeed_zero1", marks=pytest.mark.ci),
        pytest.param("torch_ddp", marks=pytest.mark.slow),
    ],
)
def test_clusters_train_on_the_cpu(engine: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, told = run_cli(
        "bench", "gpu", "--on-cpu", "--only", "trains", "--engines", engine,
        "--at-once", "1", "--out", str(out),
    )  # fmt: skip
    assert not status, told
    rows = json.loads((out / "gpu_check.json").read_text())
    assert [row["outcome"] for row in rows] == ["ok"] * 2
    assert (out / "gpu_check.md").read_text() in told


@pytest.mark.ci
def test_a_run_is_saved_and_goes_on_on_the_cpu(tmp_path: Path) -> None:
    (row,) = checks._resume(checks.Machine(0), tmp_path / "resume", "cpu")
    assert row.outcome == "ok", row


def test_waits_are_those_of_the_training_thread_in_dsx_and_outside_the_bench() -> None:
    """Of an event or stream that is waited for, the place is the innermost line of dsx."""
    seen: list[str | None] = []

    class Waited:
        def synchronize(self) -> None:
            """What a device's event has."""

    with sync_watch.noted(Waited, lambda: seen.append(sync_watch.place_of_call())):
        Waited().synchronize()  # no line of dsx has led here
        numbers = HostNumbers({"norm": 1.0})
        numbers._copied = Waited()
        numbers._values = torch.zeros(0)
        numbers.read()
        other = threading.Thread(target=numbers.read)
        other.start()
        other.join()
    assert len(seen) == 3 and seen[0] is seen[2] is None
    assert seen[1] is not None and seen[1].startswith("core/host_numbers.py:")
    Waited().synchronize()
    assert len(seen) == 3


def test_low_rank_is_looked_at_on_the_device() -> None:
    """With the CPU for a device; one whose means are others fails."""
    rows = on(on_the_side(), 64, 48, 4, 1)
    assert [row.outcome for row in rows] == ["ok", "seen", "seen", "seen", "seen"]
    assert rows[0].seen == "equal" and "ns an element" in rows[1].seen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SideProducts, "mean", lambda self, p, sp, q, sq, out: out.zero_())
        assert on(on_the_side(), 64, 48, 4, 1)[0].outcome == "failed"
