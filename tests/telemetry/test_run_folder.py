"""Finding and opening a run: which paths mean it, whose files count, and what errors say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.run_folder import cluster_file, find_run, open_run


def write_records(folder: Path, cluster: int, records: Sequence[Any], tail: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"cluster": cluster, **record}) + "\n" for record in records)
    cluster_file(folder, "metrics", ".jsonl", cluster).write_text(text + tail)


def write_steps(folder: Path, cluster: int, last: int) -> None:
    write_records(folder, cluster, [{"kind": "step", "step": s} for s in range(1, last + 1)])


def write_about(folder: Path, cluster: int, *starts: tuple[str, str, str | None]) -> None:
    """Write a run.json of starts, each a session, a time, and the session it resumed from."""
    entries = [
        {"session": session, "time": f"2026-01-01T{time}Z", "resumed_session": before}
        for session, time, before in starts
    ]
    about = {"format": 1, "starts": entries, "checkpoints": []}
    cluster_file(folder, "run", ".json", cluster).write_text(json.dumps(about))


@pytest.mark.parametrize(
    "inside",
    [
        ".",
        "metrics.jsonl",
        "checkpoints",
        "checkpoints/cluster_0/step_8",
        "checkpoints/cluster_0/step_8/dsx.json",
    ],
)
def test_any_path_inside_means_the_run(tmp_path: Path, inside: str) -> None:
    write_steps(tmp_path, 0, 1)
    (tmp_path / "checkpoints/cluster_0/step_8").mkdir(parents=True)
    (tmp_path / "checkpoints/cluster_0/step_8/dsx.json").touch()
    assert find_run(tmp_path / inside) == tmp_path


def test_a_relative_path_stays_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path / "runs/x", 0, 1)
    (tmp_path / "runs/x/checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_run("runs/x") == Path("runs/x")
    assert find_run("runs/x/checkpoints") == Path("runs/x")
    monkeypatch.chdir(tmp_path / "runs/x/checkpoints")
    assert find_run(".") == Path("..")


def test_a_directory_of_runs_names_them(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_steps(tmp_path / name, 0, 1)
    for path in (tmp_path, tmp_path / "frist"):
        with pytest.raises(FileNotFoundError) as caught:
            find_run(path)
        assert f"{tmp_path} holds " in str(caught.value) and "first" in str(caught.value)
        assert "second" in str(caught.value) and "give one of these runs" in str(caught.value)


def test_a_checkpoint_outside_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "cluster_0/a").mkdir(parents=True)
    (tmp_path / "cluster_0/a/dsx.json").touch()
    for path in (tmp_path, tmp_path / "cluster_0/a"):
        with pytest.raises(FileNotFoundError, match="a checkpoint outside of its run's folder"):
            find_run(path)


def test_records_by_step_and_by_sync(tmp_path: Path) -> None:
    sync = {"kind": "sync", "fragment": 0, "round": 1, "launched_step": 1}
    records = [
        {"kind": "start", "step": 0, "ranks": 2},
        {"kind": "step", "step": 2, "loss": 1.0},
        {"kind": "step", "step": 1},
        {"kind": "step", "step": 2, "loss": 2.0},
        {**sync, "refused_by": [0]},
        {**sync, "launched_step": 2},
        {**sync, "launched_step": 2, "bytes_sent": 4},
        {"kind": "finish", "step": 2},
        {"kind": "from the future"},
    ]
    write_records(tmp_path, 1, records, tail='{"kind": "step", "st')
    (part,) = open_run(tmp_path).clusters
    assert part.cluster == 1 and part.start is not None and part.start["ranks"] == 2
    assert [(s["step"], s.get("loss")) for s in part.steps] == [(1, None), (2, 2.0)]
    assert [(s["launched_step"], s.get("bytes_sent")) for s in part.syncs] == [(1, None), (2, 4)]
    assert part.finish is not None and part.finish["step"] == 2


def test_files_of_another_run_are_left_out(tmp_path: Path) -> None:
    for cluster in range(4):
        write_steps(tmp_path, cluster, cluster + 1)
    write_about(tmp_path, 0, ("a", "01:00", None), ("b", "02:00", "a"))
    write_about(tmp_path, 1, ("b", "02:00", "a"))  # new in the second start
    write_about(tmp_path, 2, ("a", "01:00", None))  # gone in the second start
    write_about(tmp_path, 3, ("old", "00:00", None))
    run = open_run(tmp_path)
    assert [part.cluster for part in run.clusters] == [0, 1, 2]
    assert run.left_out == ["cluster 3"]
    assert run.clusters[0].about["starts"][1]["session"] == "b"


def test_a_run_that_has_no_records_yet(tmp_path: Path) -> None:
    write_about(tmp_path, 0, ("a", "01:00", None))
    with pytest.raises(FileNotFoundError, match=r"holds no metrics\*\.jsonl: the run has not"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match=r"run\.json must hold a JSON object"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"run\.json is not valid JSON: .*; remove it"):
        open_run(tmp_path)
    for text in (
        '{"name": "not ours"}',
        '{"format": 2, "starts": [{"session": "a"}]}',
        '{"format": 1, "starts": 5}',
        '{"format": 1, "starts": [{}]}',
    ):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=r"run\.json is no run\.json of this version of dsx"):
            open_run(tmp_path)
