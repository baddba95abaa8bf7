"""Keeping the last few checkpoints: the last good one, and what another cluster needs, stay."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.keep import remove_tag, superfluous
from dsx.checkpoint.leftovers import begin_writing, end_writing
from dsx.checkpoint.tags import begin_tag, complete_tags
from dsx.training.keeping import Keeping
from dsx.training.notices import Due
from tests.checkpoint.test_tags import chosen, write


def steps(directory: Path) -> list[int]:
    return sorted(manifest["step"] for manifest in complete_tags(directory).values())


def test_what_is_older_than_the_last_few_good_ones_goes(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write(tmp_path, 0, step)
    write(tmp_path, 0, 5, is_finished=True)
    write(tmp_path, 0, 50, trouble="the masters at step 50: not finite")
    held = complete_tags(tmp_path / "cluster_0")
    common = {tag: told["step"] for tag, told in held.items()}
    assert superfluous(held, common, 2) == ["step10", "step20"]  # 50 does not count, 5 is a model
    assert superfluous(held, common, 4) == []
    assert (
        superfluous(held, {"step10": 10, "step50": 50}, 1) == []
    )  # 20 to 40 may be lacking elsewhere
    assert superfluous(held, {"step30": 30}, 1) == ["step10", "step20"]
    del held["step30"]["trouble"]  # of an older dsx: not known to be finite
    assert superfluous(held, {"step30": 30}, 1) == []
    (tmp_path / "cluster_0" / "step10" / "dsx.json").write_text("{")
    held = complete_tags(tmp_path / "cluster_0")
    assert superfluous(held, common, 2) == ["step20"]


def test_what_was_before_it_was_written_again_goes_where_all_have_the_new_one(
    tmp_path: Path,
) -> None:
    for session in "ab":
        write(tmp_path, 0, 10, session)
    held = complete_tags(tmp_path / "cluster_0")
    assert superfluous(held, {"step10": 10}, 1) == ["step10.replaced"]
    assert superfluous(held, {}, 1) == []


def test_a_deletion_that_is_killed_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    write(tmp_path, 0, 10)
    directory = tmp_path / "cluster_0"
    (directory / "step10").rename(directory / "step10.removed")  # killed before the files were gone
    assert complete_tags(directory) == {}
    begin_tag(directory, "step20")
    assert [path.name for path in directory.iterdir()] == [".writing"]
    write(tmp_path, 0, 10)
    remove_tag(directory, "step10")
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("writer", ["dead", "alive", "elsewhere", "unknown"])
@pytest.mark.parametrize("is_old", [False, True])
def test_what_a_killed_save_left_goes_unless_it_may_be_under_way(
    writer: str, is_old: bool, tmp_path: Path
) -> None:
    left = tmp_path / "step10.unfinished" / "deep"
    left.mkdir(parents=True)
    (left / "file").write_text("half")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    process = os.getppid() if writer == "alive" else ended.pid
    host = "another" if writer == "elsewhere" else socket.gethostname()
    if writer != "unknown":
        (tmp_path / ".writing").write_text(json.dumps({"host": host, "process": process}))
    if is_old:
        for path in (left / "file", left, left.parent):
            os.utime(path, (0, 0))
    begin_writing(tmp_path)
    assert left.exists() == (writer != "dead" and not is_old)
    assert json.loads((tmp_path / ".writing").read_text())["process"] == os.getpid()
    end_writing(tmp_path)
    assert not (tmp_path / ".writing").exists()


class Board:
    """Notices of several clusters in one process: all are due at the next look."""

    def __init__(self) -> None:
        self.posted: list[Due] = []
        self.seen: dict[tuple[int, str], int] = {}
        self.taken_back: list[Due] = []

    def of(self, cluster: int) -> Any:
        board = self

        class Own:
            def post(self, kind: str, payload: Any) -> None:
                board.posted.append(Due(0, kind, payload, cluster, 0))

            def due(self, kind: str) -> list[Due]:
                first = board.seen.get((cluster, kind), 0)
                board.seen[cluster, kind] = len(board.posted)
                fresh = [due for due in board.posted[first:] if due.kind == kind]
                return [due for due in fresh if due not in board.taken_back]

            def take_back(self, kind: str, is_stale: Callable[[Any], bool]) -> None:
                # a cluster takes back what it has posted itself, as the others do theirs
                board.taken_back += [
                    due
                    for due in board.posted
                    if (due.cluster, due.kind) == (cluster, kind) and is_stale(due.payload)
                ]

        return Own()


def test_a_cluster_deletes_nothing_before_all_have_what_is_newer(tmp_path: Path) -> None:
    board, forgotten = Board(), list[str]()
    clusters = [
        Keeping(board.of(m), lambda: (0, 1), True, 2, lambda path: forgotten.append(f"{path}"))
        for m in range(2)
    ]

    def save(cluster: int, step: int) -> None:
        write(tmp_path, cluster, step)
        clusters[cluster].saved(tmp_path / f"cluster_{cluster}" / f"step{step}", step)

    def pass_boundary() -> None:
        for keeping in clusters:
            keeping.pass_boundary()
            keeping.close()

    for step in (10, 20):
        save(0, step)
        save(1, step)
    pass_boundary()
    save(0, 30)  # and cluster 1 dies while it saves, or is late
    save(0, 40)
    pass_boundary()
    assert steps(tmp_path / "cluster_0") == [10, 20, 30, 40]
    save(1, 30)
    pass_boundary()
    assert steps(tmp_path / "cluster_0") == [20, 30, 40]
    assert steps(tmp_path / "cluster_1") == [20, 30]
    assert sorted(forgotten) == [str(tmp_path / f"cluster_{m}" / "step10") for m in range(2)]


@pytest.mark.parametrize("what", ["trouble", "doubt"])
def test_what_is_not_good_in_another_cluster_does_not_count_here(what: str, tmp_path: Path) -> None:
    board = Board()
    clusters = [Keeping(board.of(m), lambda: (0, 1), True, 2, lambda path: None) for m in range(2)]
    for step in (10, 20, 30, 40, 50):
        for cluster, keeping in enumerate(clusters):
            is_bad = cluster == 1 and step in (30, 40)
            trouble = "the masters are not finite" if is_bad and what == "trouble" else ""
            write(tmp_path, cluster, step, trouble=trouble, is_doubtful=is_bad and what == "doubt")
            keeping.saved(tmp_path / f"cluster_{cluster}" / f"step{step}", step)
        for keeping in clusters:
            keeping.pass_boundary()
            keeping.close()
        if step == 40:
            assert [steps(tmp_path / f"cluster_{m}") for m in range(2)] == [[10, 20, 30, 40]] * 2
    assert [steps(tmp_path / f"cluster_{m}") for m in range(2)] == [[20, 30, 40, 50]] * 2


@pytest.mark.parametrize("is_told_last", [True, False])
def test_a_name_that_one_cluster_has_written_again_is_not_what_all_have(
    is_told_last: bool, tmp_path: Path
) -> None:
    """Cluster 0 has saved `last` of step 12 before it hears that cluster 1 has that of step 8."""
    board = Board()
    clusters = [Keeping(board.of(m), lambda: (0, 1), True, 1, lambda path: None) for m in range(2)]

    def save(cluster: int, step: int) -> None:
        write(tmp_path, cluster, step, tag="last")
        clusters[cluster].saved(tmp_path / f"cluster_{cluster}" / "last", step)

    def pass_boundary() -> None:
        for keeping in clusters:
            keeping.pass_boundary()
            keeping.close()

    save(0, 8)
    clusters[0].pass_boundary()
    if not is_told_last:
        save(1, 8)
        pass_boundary()
    save(0, 12)
    if is_told_last:
        save(1, 8)
    pass_boundary()
    assert steps(tmp_path / "cluster_0") == [8, 12]
    assert chosen(tmp_path, "last") == [(0, "last.replaced"), (1, "last")]
    save(1, 12)
    pass_boundary()
    assert [steps(tmp_path / f"cluster_{m}") for m in range(2)] == [[12], [12]]


def test_a_deletion_that_fails_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board()
    keeping = Keeping(board.of(0), lambda: (0,), True, 1, lambda path: None)
    for step in (10, 20):
        write(tmp_path, 0, step, num_clusters=1)
        keeping.saved(tmp_path / "cluster_0" / f"step{step}", step)

    def refuse(self: Path, other: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refuse)
    keeping.pass_boundary()
    keeping.close()
    assert "an old checkpoint stays: [Errno 13] Permission denied" in caplog.text


@pytest.mark.parametrize(("keep", "elsewhere"), [(2, False), (1, True)])
def test_behind_a_load_in_the_same_process_what_is_saved_next_stays(
    keep: int, elsewhere: bool, tmp_path: Path
) -> None:
    """Later steps of before, which training has gone back from, are not what it is older than."""
    board = Board()
    clusters = [Keeping(board.of(m), lambda: (0, 1), True, keep, lambda _: None) for m in range(2)]

    def saved(step: int, tag: str) -> list[int]:
        for m, keeping in enumerate(clusters):
            write(tmp_path, m, step, tag=tag)
            keeping.saved(tmp_path / f"cluster_{m}" / tag, step)
        for keeping in clusters:
            keeping.pass_boundary()
            keeping.close()
        first, second = (steps(tmp_path / f"cluster_{m}") for m in range(2))
        assert first == second
        return first

    for step in (20, 30):
        saved(step, f"step{step}")
    base = tmp_path / "elsewhere" if elsewhere else tmp_path
    for m, keeping in enumerate(clusters):
        if elsewhere:
            write(base, m, 20, tag="step20")
        keeping.loaded(base / f"cluster_{m}" / "step20", 20)
    expected = [[22, 30], [24, 30]] if elsewhere else [[20, 22, 30], [22, 24, 30]]
    assert [saved(step, f"again{step}") for step in (22, 24)] == expected
