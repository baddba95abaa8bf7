"""Files of a cluster as they are copied: whole, as they grow, and anew where they are others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dsx.ctl.mirror import MARK, ClusterMirror, mirror_folder
from dsx.telemetry.served_files import MOST_BYTES, ByteBudget, ServedFiles
from dsx.telemetry.watch.run import WatchedRun
from tests.telemetry.watch.folders import about, append, make_run, step_record, write_about


class Served:
    """What a cluster answers, without a network; `asked` is how often."""

    def __init__(self, folder: Path, cluster: int) -> None:
        budget = ByteBudget(lambda: None, iter(range(0, 10**9, 100)).__next__)
        self._files = ServedFiles(cluster, lambda: folder, [("berlin", None)], budget)
        self.asked = 0

    def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked += 1
        return json.loads(json.dumps(self._files.answer(request)))


def same(run: Path, copy: Path, *names: str) -> None:
    for name in names:
        assert (copy / name).read_bytes() == (run / name).read_bytes(), name


def test_files_are_copied_as_they_grow(tmp_path: Path) -> None:
    run, copy = make_run(tmp_path / "run"), mirror_folder(tmp_path / "copy")
    served, mirror = Served(run, 1), ClusterMirror(copy, 1)
    names = "run.cluster_1.json", "metrics.cluster_1.jsonl"
    mirror.pull(served)
    same(run, copy, *names)
    assert {path.name for path in copy.iterdir()} == {*names, MARK}
    served.asked = 0
    mirror.pull(served)
    assert served.asked == 1  # nothing is new
    append(run, 1, step_record(1, 41))
    write_about(run, 1, about(1, host="elsewhere"))
    mirror.pull(served)
    same(run, copy, *names)
    again = ClusterMirror(copy, 1)  # another time, in the same folder
    append(run, 1, step_record(1, 42))
    again.pull(served)
    same(run, copy, *names)


def test_a_run_that_went_back_is_read_anew(tmp_path: Path) -> None:
    run, copy = make_run(tmp_path / "run", 1), mirror_folder(tmp_path / "copy")
    served, mirror = Served(run, 0), ClusterMirror(copy, 0)
    mirror.pull(served)
    watched = WatchedRun(copy)
    while watched.poll():
        pass
    assert watched.clusters[0].last_step["step"] == 40
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:20]
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    append(run, 0, *(step_record(0, step, loss=9.0) for step in range(30, 90)))
    mirror.pull(served)
    same(run, copy, "metrics.jsonl")
    while watched.poll():
        pass
    assert watched.clusters[0].last_step["step"] == 89
    assert watched.clusters[0].num_unreadable == 0


def test_of_a_log_the_end_is_copied(tmp_path: Path) -> None:
    run, copy = make_run(tmp_path / "run", 1), mirror_folder(tmp_path / "copy")
    line = "2026-01-01T00:00:00Z WARNING dsx: {}\n"
    (run / "log.txt").write_text("".join(line.format(i) for i in range(20_000)))
    served, mirror = Served(run, 0), ClusterMirror(copy, 0)
    mirror.pull(served)
    whole, end = (run / "log.txt").read_bytes(), (copy / "log.txt").read_bytes()
    assert whole.endswith(end) and len(end) == MOST_BYTES
    with (run / "log.txt").open("a") as file:
        file.write(line.format("more"))
    mirror.pull(served)
    assert (copy / "log.txt").read_bytes() == end + line.format("more").encode()
    (run / "log.txt").write_text("".join(line.format(-i) for i in range(20_000)))
    mirror.pull(served)  # it has begun anew, and of that, too, the end
    whole, end = (run / "log.txt").read_bytes(), (copy / "log.txt").read_bytes()
    assert whole.endswith(end) and len(end) == MOST_BYTES


def test_files_of_more_than_a_piece_come_whole(tmp_path: Path) -> None:
    run, copy = make_run(tmp_path / "run", 1), mirror_folder(tmp_path / "copy")
    (run / "summary.json").write_text(json.dumps({"x": [*range(100_000)]}))
    append(run, 0, *(step_record(0, step) for step in range(41, 2000)))
    ClusterMirror(copy, 0).pull(Served(run, 0))
    same(run, copy, "summary.json", "metrics.jsonl", "run.json")


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": 7}, {"data": "!"}, {"data": None}, {"size": None},
        {"data": "eJxLSgIAAkoBJg==", "offset": 1 << 40, "is_anew": True},
    ],
)  # fmt: skip
def test_a_member_that_lies_is_named_and_spoils_no_other_file(
    lie: dict[str, Any], tmp_path: Path
) -> None:
    run, copy = make_run(tmp_path / "run"), mirror_folder(tmp_path / "copy")
    served = Served(run, 1)

    def lies(request: Mapping[str, Any]) -> Mapping[str, Any]:
        told = served(request)
        return told if "files" in told else {**told, **lie}

    ClusterMirror(copy, 0).pull(Served(run, 0))
    try:
        for _ in range(3):
            ClusterMirror(copy, 1).pull(lies)
    except ValueError as error:
        assert "answer" in str(error) or "data" in str(error) or "base64" in str(error)
    same(run, copy, "run.json", "metrics.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "copy"}


@pytest.mark.parametrize("files", [{"run.json": 5}, {"run.json": []}, {"run.json": {"size": -1}}])
def test_a_list_that_cannot_be_read_is_named(files: dict[str, Any], tmp_path: Path) -> None:
    mirror = ClusterMirror(mirror_folder(tmp_path / "copy"), 0)
    with pytest.raises(ValueError, match=r"an answer whose run\.json cannot be read"):
        mirror.pull(lambda request: {"cluster": 0, "members": [], "files": files})


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--dir .*run holds files .* give a folder that is new"):
        mirror_folder(make_run(tmp_path / "run"))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / MARK).touch()
    assert WatchedRun(mirror_folder(tmp_path / "begun")).clusters == []
