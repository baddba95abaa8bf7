"""A file of records on a disk that fails: whole lines, and what can be written is."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsx.telemetry.jsonl import RecordFile
from dsx.telemetry.metrics import Metrics, metrics_path
from dsx.telemetry.run_folder import read_records


@pytest.fixture
def limit() -> Iterator[None]:
    """Let files grow to 1000 bytes, as on a disk that is full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def line(step: int) -> str:
    return json.dumps({"kind": "step", "step": step}) + "\n"


def test_lines_written_in_part_are_taken_back(tmp_path: Path, limit: None) -> None:
    file, written = RecordFile(tmp_path / "m.jsonl", 0, line(0)), [0]
    for step in range(1, 60):
        try:
            file.append(line(step))
        except OSError:
            continue
        written.append(step)
    file.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert text == "".join(map(line, written)) and 900 < len(text) <= 1000


def test_metrics_of_a_full_disk_end_nothing(tmp_path: Path) -> None:
    metrics_path(tmp_path, 0).symlink_to("/dev/full")
    metrics = Metrics(0)
    metrics.begin(tmp_path, None)
    for step in (1, 2, 3):
        metrics.step({"step": step})
    metrics.close()
    assert metrics._behind.missing.by_file() == {"metrics.jsonl": 3}
    metrics_path(tmp_path, 0).unlink()  # as one that has space again
    metrics.begin(tmp_path, None)
    metrics.event("note", {})
    metrics.close()
    assert [r["kind"] for r in read_records(metrics_path(tmp_path, 0))] == ["note"]


def test_where_dropped_records_cannot_go_they_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(line(1) + line(2) + '{"kind": "st')
    (tmp_path / "m.tmp").symlink_to("/dev/full")
    file = RecordFile(path, 1)
    file.append(line(2))
    file.close()
    assert "the records beyond step 1 stay (No space left on device)" in caplog.text
    assert [r["step"] for r in read_records(path)] == [1, 2, 2]
    assert not os.path.lexists(tmp_path / "m.tmp")


def test_a_folder_that_vanishes_is_not_made_again_and_used_when_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = RecordFile(folder / "m.jsonl", 0)
    file.append(line(1))
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        file.append(line(2))
    assert not folder.exists()
    folder.mkdir()
    file.append(line(3))
    file.close()
    assert [r["step"] for r in read_records(folder / "m.jsonl")] == [3]
