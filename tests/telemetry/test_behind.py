"""Writing behind the training: in order, not lost after the end, and ending nothing."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from dsx.telemetry.behind import Behind, RunLog

FILE = Path("folder/metrics.jsonl")


def test_what_comes_after_the_end_is_done_at_once(caplog: pytest.LogCaptureFixture) -> None:
    behind, done = Behind(), list[int]()
    for number in range(50):
        behind.do(lambda number=number: done.append(number), FILE)
    behind.close()
    assert done == list(range(50))
    behind.do(lambda: done.append(50), FILE)
    behind.flush()
    assert done[-1] == 50
    behind.do(lambda: 1 / 0, FILE)
    assert "folder/metrics.jsonl cannot be written: division by zero" in caplog.text


def test_a_failure_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    behind = Behind()

    def fail() -> None:
        raise OSError(28, os.strerror(28))

    for records in (1, 1, 3):
        behind.do(fail, FILE, records)
    behind.do(fail, Path("folder/log.txt"))
    behind.do(fail, Path("folder/run.json"), is_whole=True)
    behind.do(lambda: None, Path("folder/run.json"), is_whole=True)  # whole after all
    behind.flush()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "cannot be written: No space left on device" in told[0]
    assert behind.missing.by_file() == {"log.txt": 1, "metrics.jsonl": 5}
    for _ in range(2):
        behind.missing.tell()
    behind.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "metrics.jsonl: 5 (No space left on device)" in told[1]


def test_a_disk_that_hangs_is_not_waited_for_without_end() -> None:
    behind, is_free = Behind(deadline_seconds=0.05), threading.Event()
    behind.do(is_free.wait, FILE)
    behind.flush()
    behind.close()
    assert not is_free.is_set()
    is_free.set()


def test_a_forked_worker_writes_its_own_words_only(tmp_path: Path) -> None:
    behind, is_free = Behind(), threading.Event()
    path = tmp_path / "log.txt"
    behind.do(is_free.wait, FILE)
    behind.do(lambda: path.write_text("parent\n"), path)
    child = os.fork()
    if child == 0:
        behind.do(lambda: path.write_text("child\n"), path)
        behind.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_text() == "child\n"
    is_free.set()
    behind.close()
    assert path.read_text() == "parent\n"


def test_warnings_are_shown_where_nothing_else_shows_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs = [RunLog(Behind()) for _ in range(2)]
    logging.getLogger("dsx.tests").warning("shown")
    logging.getLogger("dsx.tests").info("not shown")
    for log in logs:
        log.close()
    assert capsys.readouterr().err == "shown\n"
