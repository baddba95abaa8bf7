"""`dsx agent`: a command is started again, told of signals, and ended in time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dsx.agent.copies import copy_newest
from dsx.agent.tries import Tries, as_shell
from dsx.checkpoint.checksums import MANIFEST, sealed
from dsx.checkpoint.remote import Remote

QUICK = ["--wait", "0.1", "--most-wait", "0.2"]


@pytest.fixture
def start(tmp_path: Path) -> Generator[Any]:
    """Start an agent over a shell script, in `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dsx", "agent", *options, "--", "sh", "-c", script]
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip
        )
        return started[-1]

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(10)


def wait_for(path: Path, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} does not come"
        time.sleep(0.05)


def test_what_fails_is_started_again_until_it_is_done(start: Any, tmp_path: Path) -> None:
    script = "echo x >> starts; [ $(wc -l < starts) -ge 3 ] || exit 7"
    agent = start(script, *QUICK)
    said, _ = agent.communicate(timeout=60)
    assert agent.returncode == 0, said
    assert (tmp_path / "starts").read_text() == "x\n" * 3
    told = r"exit status 7 after \d+ s; failure 2 of 4 that are tried again; starting it again"
    assert re.search(told, said), said


@pytest.mark.parametrize(
    ("script", "status", "starts", "why"),
    [
        ("echo x >> starts; exit 7", 7, 3, "the same failure each time: 3 failures within 3600 s"),
        ("echo x >> starts; exit 2", 2, 1, "a mistake in what it was given"),
    ],
)
def test_it_gives_up_with_a_reason(
    start: Any, tmp_path: Path, script: str, status: int, starts: int, why: str
) -> None:
    agent = start(script, *QUICK, "--tries", "3")
    said, _ = agent.communicate(timeout=60)
    assert agent.returncode == status and why in said, said
    assert (tmp_path / "starts").read_text() == "x\n" * starts


def test_a_signal_is_passed_on_to_all_and_all_are_waited_for(start: Any, tmp_path: Path) -> None:
    """As to ranks that save behind a launcher that has gone."""
    rank = "trap 'sleep 1; echo saved > saved; exit 0' TERM; touch up; while :; do sleep 0.1; done"
    agent = start(f"({rank}) & trap 'exit 0' TERM; wait", *QUICK)
    wait_for(tmp_path / "up")
    agent.send_signal(signal.SIGTERM)
    said, _ = agent.communicate(timeout=60)
    assert agent.returncode == 143 and (tmp_path / "saved").exists(), said
    assert "told by SIGTERM: SIGTERM is passed on; it has 60 s" in said


def test_who_does_not_end_in_time_is_killed(start: Any, tmp_path: Path) -> None:
    agent = start("trap '' TERM; touch up; while :; do sleep 0.1; done", *QUICK, "--grace", "1")
    wait_for(tmp_path / "up")
    agent.send_signal(signal.SIGTERM)
    said, _ = agent.communicate(timeout=60)
    assert agent.returncode == 143 and "killing them" in said


def save(folder: Path, cluster: int, tag: str, step: int, num_bytes: int = 1000) -> None:
    path = folder / f"cluster_{cluster}" / tag
    (path / "parts").mkdir(parents=True)
    (path / "parts" / "rank_0.bin").write_bytes(os.urandom(num_bytes))
    (path / MANIFEST).write_text(json.dumps(sealed({"step": step, "_files": {}})))


def test_a_notice_ends_it_and_what_it_saves_is_copied(start: Any, tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 0, "step5", 5)
    save(tmp_path / "late", 0, "preempted_step9", 9)
    script = (
        "trap 'mv late/cluster_0/preempted_step9 checkpoints/cluster_0; exit 0' TERM; touch up; "
        "while :; do sleep 0.1; done"
    )
    agent = start(
        script, *QUICK, "--notice", "cat gone 2>/dev/null", "--notice-every", "0.2",
        "--checkpoints", "checkpoints", "--to", f"file://{tmp_path}/bucket",
    )  # fmt: skip
    wait_for(tmp_path / "up")
    time.sleep(0.5)
    assert agent.poll() is None
    (tmp_path / "gone").write_text("in two minutes")
    said, _ = agent.communicate(timeout=60)
    assert agent.returncode == 143, said
    assert "the machine is about to be taken away (in two minutes): SIGTERM is passed on" in said
    bucket = tmp_path / "bucket" / "cluster_0"
    assert [path.name for path in bucket.iterdir()] == ["preempted_step9"]
    there, here = (
        bucket / "preempted_step9",
        tmp_path / "checkpoints" / "cluster_0" / "preempted_step9",
    )
    for name in ("parts/rank_0.bin", MANIFEST):
        assert (there / name).read_bytes() == (here / name).read_bytes()


def test_what_is_missing_for_a_copy_is_said_at_once(start: Any, tmp_path: Path) -> None:
    for options, why in (
        (["--to", "s3://bucket"], "--to needs --notice, and --checkpoints DIR"),
        (["--notice", "false", "--checkpoints", ".", "--to", "no-such-thing://x"], "no-such-thing"),
        (["--notice-signal", "KILL"], "must be one of TERM, USR1"),
    ):
        agent = start("exit 0", *options)
        said, _ = agent.communicate(timeout=60)
        assert agent.returncode == 2 and why in said, said


def test_the_newest_of_each_cluster_is_copied(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 1, "step5", 5)
    save(tmp_path / "checkpoints", 1, "step7", 7)
    told: list[str] = []
    remote = Remote(f"file://{tmp_path}/there", "--to")
    copied = copy_newest(tmp_path / "checkpoints", remote, told.append)
    assert copied == [f"file://{tmp_path}/there/cluster_1/step7"]
    assert list(remote.tags(1)) == ["step7"] and "2 files" in told[-1]
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        copy_newest(tmp_path / "empty", remote, told.append)


def test_waits_grow_and_what_ran_long_enough_starts_anew() -> None:
    tries = Tries(4, 100.0, 5.0, 12.0)
    assert [tries.judge(1, now, 1.0).wait_seconds for now in (0.0, 10.0, 20.0)] == [5.0, 10.0, 12.0]
    assert tries.judge(143, 30.0, 1.0).wait_seconds == 5.0  # with the others, in order
    assert tries.judge(1, 40.0, 500.0).wait_seconds == 5.0  # it had trained for longer than that
    for now in (50.0, 60.0):
        assert tries.judge(9, now, 1.0).wait_seconds is not None
    over = tries.judge(9, 70.0, 1.0)
    assert over.wait_seconds is None and "exit statuses 9 (3 times), 1 (1 times)" in over.why
    assert (as_shell(-9), as_shell(3)) == (137, 3)
