"""run.json and the log: starts, resumes, checkpoints, ends, and whose folder it is."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.metrics import metrics_path
from dsx.telemetry.run_file import Origin, RunFile
from dsx.telemetry.run_folder import read_about

LOGGER = logging.getLogger("dsx.tests")


def start(
    folder: Path | None,
    session: str,
    step: int = 0,
    origin: Origin | None = None,
    cluster: int = 0,
    **facts: Any,
) -> tuple[RunFile, bool]:
    """Begin as a handle does: from step 0, then from a checkpoint if there is one."""
    own = {"session": session, "host": socket.gethostname(), "pid": os.getpid()} | facts
    run = RunFile(folder, cluster, {"metrics": "metrics.jsonl"}, own)
    continues = run.begin(0, None)
    if origin is not None:
        continues = run.begin(step, origin)
    run.confirm()
    if folder is not None:
        metrics_path(folder, cluster).touch()
    return run, continues


def about(folder: Path, cluster: int = 0) -> dict[str, Any]:
    return read_about(folder)[cluster]


def test_a_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    run, continues = start(tmp_path / "run", "a", versions={"dsx": "1"})
    assert not continues
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
    run = RunFile(tmp_path / "run", 0, {}, {"session": "a"})
    run.begin(0, None)
    run.close()
    assert not (tmp_path / "run").exists()
    run, _ = start(None, "a")
    run.saved(tmp_path / "cluster_0/x", 1)
    run.end(1, "finished")
    run.close()
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    first, _ = start(tmp_path, "a")
    LOGGER.warning("first")
    first.saved(tmp_path / "c/cluster_0/x", 4)
    first.close()  # as a killed run leaves it: no end
    second, continues = start(tmp_path, "b", 4, Origin(tmp_path / "c/cluster_0/x", "a"))
    LOGGER.warning("second")
    second.close()
    assert continues
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
    run, continues = start(tmp_path, "b", 4, origin, cluster=2)
    run.close()
    assert continues and about(tmp_path, 2)["starts"][0]["resumed_session"] == "a"


def test_a_run_of_before_run_json_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics_path(tmp_path, 0).write_text('{"kind": "step", "step": 1}\n')
    run, continues = start(tmp_path, "b", 4, Origin(tmp_path / "c/cluster_0/x", "a"))
    run.close()
    assert continues and "another run" not in caplog.text


@pytest.mark.parametrize("cluster", [0, 1])
def test_another_run_s_folder_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cluster: int
) -> None:
    for m in (0, 1):
        earlier, _ = start(tmp_path, "a", cluster=m)
        LOGGER.warning("of the first run")
        earlier.saved(tmp_path / "c/cluster_0/x", 4)
        earlier.end(7, "finished")
        earlier.close()
    caplog.clear()
    run, continues = start(tmp_path, "b", cluster=cluster)
    run.close()
    assert not continues
    is_told = f"{tmp_path} holds records of another run (begun " in caplog.text
    assert is_told == (cluster == 0), "one cluster says it for all that share the folder"
    if is_told:
        assert "finished at step 7" in caplog.text and "another dsx.metrics.dir" in caplog.text
    found = about(tmp_path, cluster)
    assert [s["session"] for s in found["starts"]] == ["b"] and not found["checkpoints"]
    log = tmp_path / ("log.cluster_1.txt" if cluster else "log.txt")
    assert "of the first run" not in log.read_text()


def test_a_checkpoint_of_a_run_that_the_folder_is_not_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, "a")[0].close()
    run, continues = start(tmp_path, "c", 4, Origin(tmp_path / "x", "b"))
    run.close()
    assert not continues
    assert f"than {tmp_path / 'x'}: this run takes their place" in caplog.text


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"pid": os.getpid()}, f"; running as process {os.getpid()})"),
        ({"pid": 2**22 + 1}, "; killed)"),  # above any process's number
        ({"host": "elsewhere"}, "; no end recorded: killed, or running on elsewhere)"),
    ],
    ids=["running", "killed", "elsewhere"],  # not by the process's number, which differs
)
def test_the_state_of_a_run_that_said_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, facts: dict[str, Any], state: str
) -> None:
    start(tmp_path, "a", **facts)[0].close()
    start(tmp_path, "b")[0].close()
    assert state in caplog.text


def test_an_end_is_taken_back_where_training_goes_on(tmp_path: Path) -> None:
    run, _ = start(tmp_path, "a")
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
    run, _ = start(tmp_path, "a")
    is_free = threading.Event()
    run.flush()
    run._behind.do(is_free.wait)  # a disk that hangs
    run.saved(tmp_path / "c/cluster_0/x", 4)
    LOGGER.warning("while it hangs")
    assert not about(tmp_path)["checkpoints"]
    is_free.set()
    run.close()
    assert about(tmp_path)["checkpoints"] and "while it hangs" in (tmp_path / "log.txt").read_text()


def test_a_disk_that_fails_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = start(tmp_path / "run", "a")
    run.flush()
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    run.end(4, "finished")
    run.close()
    assert "a file of the run's folder cannot be written" in capsys.readouterr().err


def test_no_half_file_is_ever_seen(tmp_path: Path) -> None:
    run, _ = start(tmp_path, "a", filler=["x" * 1000] * 100)
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
