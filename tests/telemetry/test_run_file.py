"""run.json and the log: starts, resumes, checkpoints, ends, and whose folder it is."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.folder_choice import Origin, look
from dsx.telemetry.metrics import metrics_path
from dsx.telemetry.run_file import RunFile
from dsx.telemetry.run_folder import read_about

LOGGER = logging.getLogger("dsx.tests")


def start(
    folder: Path | None,
    session: str,
    step: int = 0,
    origin: Origin | None = None,
    cluster: int = 0,
    **facts: Any,
) -> RunFile:
    """Begin as a handle does: from step 0, then from a checkpoint if there is one."""
    own = {"session": session, "host": socket.gethostname(), "pid": os.getpid()} | facts
    run = RunFile(folder is not None, cluster, {"metrics": "metrics.jsonl"}, own)
    run.begin(folder, 0, None, False)
    if origin is not None:
        run.begin(folder, step, origin, True)
    run.confirm()
    run.flush()
    if folder is not None:
        metrics_path(folder, cluster).touch()
    return run


def about(folder: Path, cluster: int = 0) -> dict[str, Any]:
    return read_about(folder)[cluster]


def test_a_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "a", versions={"dsx": "1"})
    folder = tmp_path / "run"
    run.saved(folder / "checkpoints" / "cluster_0" / "x", 4)
    run.saved(tmp_path / "elsewhere" / "cluster_0" / "y", 8)
    run.saved(folder / "checkpoints" / "cluster_0" / "x", 12)
    run.end(13, "finished")
    run.end(13, "closed without finish()")
    run.close()
    found = about(folder)
    (only,) = found["starts"]
    assert (only["session"], only["step"], only["resumed_from"]) == ("a", 0, None)
    assert only["versions"] == {"dsx": "1"} and only["time"].endswith("Z")
    assert (only["end"]["step"], only["end"]["how"]) == (13, "finished")
    assert [(c["path"], c["tag"], c["step"]) for c in found["checkpoints"]] == [
        (str(tmp_path / "elsewhere/cluster_0/y"), "y", 8),
        ("checkpoints/cluster_0/x", "x", 12),
    ]
    assert found["files"] == {"metrics": "metrics.jsonl", "log": "log.txt"}


def test_nothing_is_written_before_a_first_step_nor_without_a_folder(tmp_path: Path) -> None:
    run = RunFile(True, 0, {}, {"session": "a"})
    run.begin(tmp_path / "run", 0, None, False)
    run.close()
    assert not (tmp_path / "run").exists()
    run = start(None, "a")
    run.saved(tmp_path / "cluster_0/x", 1)
    run.end(1, "finished")
    run.close()
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    first = start(tmp_path, "a")
    LOGGER.warning("first")
    first.saved(tmp_path / "c/cluster_0/x", 4)
    first.close()  # as a killed run leaves it: no end
    second = start(tmp_path, "b", 4, Origin(tmp_path / "c/cluster_0/x", "a"))
    LOGGER.warning("second")
    second.close()
    found = about(tmp_path)
    assert [(s["session"], s["step"], s["resumed_from"]) for s in found["starts"]] == [
        ("a", 0, None),
        ("b", 4, "c/cluster_0/x"),
    ]
    assert [c["tag"] for c in found["checkpoints"]] == ["x"]
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split()[1:] for line in lines] == [
        ["WARNING", "dsx.tests:", "first"],
        ["WARNING", "dsx.tests:", "second"],
    ]


def test_a_cluster_that_is_new_in_a_resumed_run(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "c/cluster_0/x", "a")
    start(tmp_path, "b", 4, origin, cluster=2).close()
    assert about(tmp_path, 2)["starts"][0]["resumed_session"] == "a"


def test_an_end_is_taken_back_where_training_goes_on(tmp_path: Path) -> None:
    run = start(tmp_path, "a")
    run.end(4, "finished")
    run.flush()
    assert about(tmp_path)["starts"][0]["end"]["step"] == 4
    run.confirm()
    run.flush()
    assert about(tmp_path)["starts"][0]["end"] is None
    run.end(8, "PeerLost: cluster 1 is gone")
    run.close()
    assert about(tmp_path)["starts"][0]["end"]["how"] == "PeerLost: cluster 1 is gone"


def test_the_thread_that_trains_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    run = start(tmp_path, "a")
    is_free = threading.Event()
    run.flush()
    run._behind.do(is_free.wait, tmp_path)  # a disk that hangs
    run.saved(tmp_path / "c/cluster_0/x", 4)
    LOGGER.warning("while it hangs")
    assert not about(tmp_path)["checkpoints"]
    is_free.set()
    run.close()
    assert about(tmp_path)["checkpoints"] and "while it hangs" in (tmp_path / "log.txt").read_text()


def test_a_folder_that_vanishes_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(tmp_path / "run", "a")
    run.flush()
    shutil.rmtree(tmp_path / "run")
    run.end(4, "finished")
    run.close()
    assert "cannot be written: No such file or directory" in caplog.text
    assert "records of the run are missing, by file: " in caplog.text
    assert "run.json: 1" in caplog.text
    assert not (tmp_path / "run").exists()  # it may be where a disk was


def test_an_end_says_what_is_missing(tmp_path: Path) -> None:
    run = start(tmp_path, "a")
    run._behind.missing.add(tmp_path / "metrics.jsonl", "No space left on device", 3)
    run.end(4, "finished")
    run.close()
    assert about(tmp_path)["starts"][0]["end"]["missing"] == {"metrics.jsonl": 3}


def test_a_run_json_cut_off_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, "a").close()
    whole = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(whole[:50])
    assert look(tmp_path, 0) == {"1": None}
    assert (tmp_path / "run.json.damaged").read_text() == whole[:50]
    assert "run.json is not whole, and set aside as run.json.damaged" in caplog.text
    start(tmp_path, "b", 4, Origin(tmp_path / "c/cluster_0/x", "a")).close()
    assert [s["session"] for s in about(tmp_path)["starts"]] == ["b"]


def test_what_a_killed_start_left_half_written_goes(tmp_path: Path) -> None:
    own = ["metrics.tmp", "run.json.tmp", "trace.cluster_0.rank_3.tmp"]
    others = ["metrics.cluster_1.tmp", "run.cluster_1.json.tmp", "trace.cluster_1.rank_0.tmp"]
    for name in (*own, *others, "mine.tmp"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "trace.cluster_0.rank_1.tmp").touch()  # a moment ago: somebody writes it
    start(tmp_path, "a").close()
    left = {path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"}
    assert left == {*others, "mine.tmp", "trace.cluster_0.rank_1.tmp"}


def test_no_half_file_is_ever_seen(tmp_path: Path) -> None:
    run = start(tmp_path, "a", filler=["x" * 1000] * 100)
    run.flush()
    is_over = threading.Event()

    def save() -> None:
        for step in range(200):
            run.saved(tmp_path / f"c/cluster_0/{step}", step)
        run.close()
        is_over.set()

    threading.Thread(target=save).start()
    reads = 0
    while not is_over.is_set() or reads < 3:
        json.loads((tmp_path / "run.json").read_text())
        reads += 1
    assert len(about(tmp_path)["checkpoints"]) == 200
