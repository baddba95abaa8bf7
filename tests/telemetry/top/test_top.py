"""A run in a terminal: what is shown of files, as they grow, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dsx.cli import app
from dsx.telemetry.run_file import RunFile
from dsx.telemetry.top.show import COLUMNS, plain, screen
from dsx.telemetry.top.standing import RunFiles, Standing
from tests.signals import default_sigint


def write_run(folder: Path, cluster: int = 0, end: str = "", **facts: Any) -> None:
    """Write the run.json of a cluster that this process trains."""
    facts = {"session": "s", "host": os.uname().nodename, "pid": os.getpid(), **facts}
    run = RunFile(True, cluster, {}, facts)
    run.begin(folder, 0, None, False)
    run.confirm()
    run.saved(folder / "checkpoints" / "step40", 40)
    if end:
        run.end(60, end)
    run.close()


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def step(number: int, ago: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "time": time.time() - ago, "seconds": 0.5,
        "blocked_seconds": 0.1, "bytes_sent": 250_000 * number, **more,
    }  # fmt: skip


def sync(ago: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"kind": "sync", "applied_step": 1, "launched_step": 1, "fragment": 0,
            "time": time.time() - ago,
            "transfer_seconds": 2.0, "wait_seconds": 0.5, "bytes_sent": 10, **more}  # fmt: skip


def test_rates_are_of_the_last_minute(tmp_path: Path) -> None:
    write_run(tmp_path)
    append(tmp_path / "metrics.jsonl", step(1, 500, loss=9.0, seconds=300.0, tokens=1))
    append(tmp_path / "metrics.jsonl", *(step(n, 5 - n / 2, tokens=100) for n in range(2, 10)))
    append(tmp_path / "metrics.jsonl", step(10, loss=2.0, tokens=100), sync(), sync(refused_by=[1]))
    (one,) = RunFiles(tmp_path).look()
    assert (one.state, one.step, one.loss, one.saved_step, one.left_out) == (
        "training", 10, 2.0, 40, 1,
    )  # fmt: skip
    assert (one.steps_per_second, one.tokens_per_second) == (2.0, 200.0)
    assert one.utilization == pytest.approx(0.8) and one.hidden == 0.75
    assert one.bytes_per_second == 250_000 / 0.5  # of each step
    assert one.age_seconds is not None and one.age_seconds < 2


def test_memory_and_the_farthest_cluster_are_of_the_last_look(tmp_path: Path) -> None:
    write_run(tmp_path)
    append(tmp_path / "metrics.jsonl", step(1))
    files = RunFiles(tmp_path)
    assert [files.look()[0].process_bytes, files.look()[0].round_trip_seconds] == [None, None]
    for trip in (0.5, 0.02):
        links = [{"to": 1, "round_trip_seconds": trip}, {"to": 2, "sent_bytes": 3}]
        look = {"kind": "machine", "time": time.time(), "step": 1, "process_bytes": 4e8}
        append(tmp_path / "metrics.jsonl", {**look, "links": links})
    standings = files.look()
    for width, is_shown in ((160, True), (130, False)):
        console = Console(width=width, file=io.StringIO(), highlight=False)
        console.print(screen("run", standings, [], width))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("20 ms" in shown and "400 MB" in shown) == is_shown, shown


def test_what_a_cluster_sends_stands_beside_what_its_line_was_measured_to(tmp_path: Path) -> None:
    write_run(tmp_path)
    append(tmp_path / "metrics.jsonl", *(step(n) for n in range(1, 4)), sync())
    files = RunFiles(tmp_path)
    for told, shown in (({}, "4"), ({"measured_bytes_per_second": 11.75e6}, "4 of 94")):
        append(tmp_path / "metrics.jsonl", {"kind": "machine", "time": time.time(), "step": 3,
                                            **told})  # fmt: skip
        console = Console(width=80, file=io.StringIO(), highlight=False)
        console.print(screen("run", files.look(), [], 80))
        drawn = console.file.getvalue()  # type: ignore[attr-defined]
        assert f" {shown} \u2502" in drawn and "Mbit/s sent" in drawn


def test_what_a_resumed_run_has_again_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    kept = [step(1, 3, tokens=100), sync(2, refused_by=[1])]
    append(path, *kept, step(2, 1, tokens=100, loss=9.0))
    files = RunFiles(tmp_path)
    files.look()
    append(tmp_path / "new", *kept)
    (tmp_path / "new").replace(path)
    (one,) = files.look()
    assert (one.step, one.loss, one.left_out, one.tokens_per_second) == (1, None, 1, 200.0)
    append(path, step(2, tokens=100), sync(refused_by=[1]))
    (one,) = files.look()
    assert (one.step, one.left_out, one.bytes_per_second) == (2, 2, 500_000)


@pytest.mark.parametrize(
    ("end", "pid", "ago", "state"),
    [("finished", 0, 500, "finished at step 60"), ("", 0, 500, "silent"), ("", 0, 1, "training"),
     ("", 2**22 + 5, 1, "killed"), ("x" * 99, 0, 1, "x" * 60 + "...")],
)  # fmt: skip
def test_what_a_cluster_does(tmp_path: Path, end: str, pid: int, ago: float, state: str) -> None:
    write_run(tmp_path, 1, end, **({"pid": pid} if pid else {}))
    append(tmp_path / "metrics.cluster_1.jsonl", step(60, ago))
    (one,) = RunFiles(tmp_path).look()
    assert (one.cluster, one.state) == (1, state)


def test_a_slow_step_is_no_silence(tmp_path: Path) -> None:
    write_run(tmp_path)
    append(tmp_path / "metrics.jsonl", step(1, 60, seconds=40.0))
    (one,) = RunFiles(tmp_path).look()
    assert one.state == "training"


def test_a_run_that_has_taken_no_step(tmp_path: Path) -> None:
    write_run(tmp_path)
    (one,) = RunFiles(tmp_path).look()
    assert one.state == "starting" and one.step is None and one.steps_per_second is None
    assert {told(one) for _, told in COLUMNS} == {"0", "starting", "-", "40"}


def test_a_long_file_is_looked_at_from_its_end_and_one_in_its_place_is_begun_anew(
    tmp_path: Path,
) -> None:
    write_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    record = {"kind": "step", "time": time.time(), "cluster": 0, "seconds": 1.0}
    path.write_text("".join(json.dumps({**record, "step": n}) + "\n" for n in range(20_000)))
    files = RunFiles(tmp_path)
    (one,) = files.look()
    assert one.step == 19_999
    (tmp_path / "new").write_text(json.dumps({**record, "step": 3}) + "\n")
    (tmp_path / "new").replace(path)
    (one,) = files.look()
    assert one.step == 3


def test_a_line_that_is_too_long_is_named_once(tmp_path: Path) -> None:
    write_run(tmp_path)
    files = RunFiles(tmp_path)
    append(tmp_path / "metrics.jsonl", {"kind": "step", "time": time.time(), "step": 1})
    files.look()
    for _ in range(2):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write("a" * (2 << 20) + "\n")
        for _ in range(2):
            files.look()
    events = [event for event in files.events(40) if "longer than 1 MiB" in event]
    assert len(events) == 1 and "cluster 0: a line of metrics.jsonl" in events[0]


def test_warnings_of_all_logs_are_below_and_hold_no_orders_for_a_terminal(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_run(tmp_path, 1)
    lines = "2026-01-01T00:00:0{}Z {} dsx.outer: {}\n"
    (tmp_path / "log.txt").write_text(
        lines.format(1, "INFO", "no") + lines.format(3, "ERROR", "late: \x1b[2J\x9b31m[red]")
    )
    (tmp_path / "log.cluster_1.txt").write_text(lines.format(2, "WARNING", "early"))
    done = CliRunner().invoke(app, ["top", "--once", str(tmp_path)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    early, late = done.output.splitlines()[-2:]
    assert early == "2026-01-01T00:00:02Z cluster 1: early"
    assert late.endswith("cluster 0: late:  [2J 31m[red]")
    assert plain("a\x1b]0;b\x07") == "a ]0;b "


def test_a_narrow_terminal_has_what_matters_most() -> None:
    from rich.console import Console

    one = Standing(0, "training", 1, 2.0, 1.0, 9.0, 0.5, 1e6, 0.9, 0, 3, 1.0)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen("first", [one], [], 80))
    text = console.export_text()
    assert (
        " 8 \u2502" in text and "Mbit/s sent" in text and "50.0%" in text and "tokens" not in text
    )
    assert max(map(len, text.splitlines())) <= 80


def test_no_run_is_said_in_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["top", str(tmp_path)])
    assert done.exit_code == 2 and "holds no metrics*.jsonl and no run.json" in done.output


@pytest.mark.parametrize("how", ["q", "signal"])
def test_in_a_terminal_it_goes_on_until_it_is_told_to_end(tmp_path: Path, how: str) -> None:
    write_run(tmp_path)
    append(tmp_path / "metrics.jsonl", step(111))
    own, theirs = pty.openpty()
    command = [sys.executable, "-m", "dsx", "top", "--seconds", "0.3", str(tmp_path)]
    environment = {**os.environ, "COLUMNS": "140", "TERM": "xterm"}
    run = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        preexec_fn=default_sigint,
    )  # fmt: skip
    os.close(theirs)
    try:
        read_until(own, b" 111 ")
        append(tmp_path / "metrics.jsonl", step(222))
        read_until(own, b" 222 ")
        os.write(own, b"q") if how == "q" else run.send_signal(signal.SIGINT)
        rest = read_until(own, b"\x1b[?1049l")  # the screen that was there before
        assert rest is not None and run.wait(30) == 0
    finally:
        run.kill()
        run.wait()
        os.close(own)


def read_until(terminal: int, mark: bytes, seconds: float = 90.0) -> bytes:
    found, until = b"", time.monotonic() + seconds
    while mark not in found:
        assert time.monotonic() < until, found
        if select.select([terminal], [], [], 0.5)[0]:
            found += os.read(terminal, 65536)
    return found
