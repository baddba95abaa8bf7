"""A tag that is written again and again: what all clusters hold of it stays, however far one is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.checksums import MANIFEST, name_of
from dsx.checkpoint.tags import complete_tags
from dsx.checkpoint.written_again import Version, hold_back, versions
from dsx.training import keeping as keeping_module
from dsx.training.keeping import Keeping
from tests.checkpoint.test_keep import Board
from tests.checkpoint.test_tags import chosen, write


class Clusters:
    """Two clusters that save `last`; what they tell each other comes as `hear` is called."""

    def __init__(self, base: Path, keep: int | None = None) -> None:
        self.base, board = base, Board()
        self.all = [
            Keeping(board.of(m), lambda: (0, 1), True, keep, lambda path: None) for m in range(2)
        ]

    def save(self, step: int, *clusters: int, fails: bool = False) -> None:
        for m in clusters:
            own = self.base / f"cluster_{m}"
            self.all[m].make_way(own, "last", step)
            if fails:
                self.all[m].failed(own / "last", step)
            else:
                write(self.base, m, step, tag="last")
                self.all[m].saved(own / "last", step)

    def hear(self) -> None:
        for keeping in self.all:
            keeping.pass_boundary()
            keeping.close()

    def steps(self, cluster: int) -> list[int]:
        found = complete_tags(self.base / f"cluster_{cluster}")
        return sorted(manifest["step"] for manifest in found.values())

    def loadable(self) -> list[int]:
        """The steps that the clusters would load as `last`."""
        found = chosen(self.base, "last")
        return [
            complete_tags(self.base / f"cluster_{m}")[tag]["step"] for m, (_, tag) in
            enumerate(found)
        ]  # fmt: skip


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("is_heard", [True, False])
def test_two_saves_ahead_the_state_that_all_hold_is_still_there(
    is_heard: bool, keep: int | None, tmp_path: Path
) -> None:
    """Cluster 1's disk is full, or it is that late."""
    clusters = Clusters(tmp_path, keep)
    for step in (4, 8):
        clusters.save(step, 0, 1)
        if is_heard:
            clusters.hear()
    for step in (12, 16, 20, 24):
        clusters.save(step, 0)
        clusters.save(step, 1, fails=True)
        if is_heard:
            clusters.hear()
        assert clusters.loadable() == [8 if is_heard or step == 12 else 4] * 2
    assert len(clusters.steps(0)) == 3
    for step in (28, 32):  # it has space again
        clusters.save(step, 0, 1)
        clusters.hear()
        assert clusters.loadable() == [step] * 2
    clusters.save(36, 0, 1)
    assert clusters.steps(0) == clusters.steps(1) == [32, 36]


def test_what_all_hold_stays_where_the_first_save_of_one_failed(tmp_path: Path) -> None:
    """What the others have of that step is older, and of no use."""
    clusters = Clusters(tmp_path)
    clusters.save(4, 0)
    clusters.save(4, 1, fails=True)
    clusters.hear()
    clusters.save(8, 0, 1)
    clusters.hear()
    for step in (12, 16, 20):
        clusters.save(step, 0)
        clusters.save(step, 1, fails=True)
        clusters.hear()
        assert clusters.loadable() == [8, 8]


def test_in_step_and_heard_there_are_two_as_ever(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path)
    for step in (4, 8, 12, 16):
        clusters.save(step, 0, 1)
        clusters.hear()
    assert clusters.steps(0) == clusters.steps(1) == [12, 16]


def test_word_that_comes_after_two_saves_more_counts_for_nothing(tmp_path: Path) -> None:
    """What all have told of is gone by then where they have saved since."""
    clusters = Clusters(tmp_path)
    clusters.save(4, 0, 1)
    clusters.save(8, 0, 1)
    clusters.hear()
    clusters.save(12, 0, 1)
    clusters.save(16, 0)
    clusters.save(16, 1, fails=True)
    clusters.save(20, 0)
    clusters.save(20, 1, fails=True)
    assert clusters.steps(0) == [8, 16, 20] and clusters.steps(1) == [8, 12]
    clusters.hear()  # both have told of 12
    clusters.save(24, 1)
    assert clusters.loadable() == [8, 8]


def test_what_was_loaded_of_it_has_the_name_again_before_the_next_save(tmp_path: Path) -> None:
    before = Clusters(tmp_path)
    for step in (4, 8):
        before.save(step, 0, 1)
        before.hear()
    for step in (12, 16):
        before.save(step, 0)
    assert before.steps(0) == [8, 12, 16]
    after = Clusters(tmp_path)
    for m, (_, tag) in enumerate(chosen(tmp_path, None)):
        after.all[m].loaded(tmp_path / f"cluster_{m}" / tag, 8)
    for step in (12, 16):  # and cluster 1 is killed in its first save
        after.save(step, 0)
    assert after.loadable() == [8, 8]
    after.save(16, 1)
    after.hear()
    after.save(20, 0, 1)
    assert after.steps(0) == after.steps(1) == [16, 20]


def test_what_a_save_has_given_another_name_is_not_deleted_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save begins at the boundary where an older one becomes superfluous, whose deletion waits
    for a slow disk meanwhile: by then the name is that of what both hold.
    """
    clusters = Clusters(tmp_path, keep=1)
    clusters.save(4, 0, 1)
    clusters.hear()
    clusters.save(8, 0, 1)
    listed, may_go = threading.Event(), threading.Event()

    def slow(directory: Path) -> dict[str, dict[str, Any]]:
        found = complete_tags(directory)
        if threading.current_thread() is not threading.main_thread():
            listed.set()
            assert may_go.wait(60)
        return found

    monkeypatch.setattr(keeping_module, "complete_tags", slow)
    clusters.all[0].pass_boundary()  # both hold 8: that of 4 may go
    assert listed.wait(60)
    clusters.save(12, 0)
    clusters.save(12, 1, fails=True)
    may_go.set()
    clusters.all[0].close()
    assert clusters.steps(0) == [8, 12] and clusters.loadable() == [8, 8]


@pytest.mark.parametrize(
    ("known", "left"),
    [(None, [4, 12, 16]), (12, [12, 16]), (8, [8, 12, 16]), (4, [4, 12, 16]), (99, [4, 12, 16])],
)
def test_what_is_held_back(known: int | None, left: Sequence[int], tmp_path: Path) -> None:
    own = tmp_path / "cluster_0"
    for step in (4, 8, 12):
        if step == 12:
            hold_back(own, "last", Version(4, "a"))
        write(tmp_path, 0, step, tag="last")
    assert {name: version.step for name, version in versions(own, "last").items()} == {
        "last": 12, "last.replaced": 8, "last.held.replaced": 4,
    }  # fmt: skip
    assert {name_of(name) for name in versions(own, "last")} == {"last"}
    hold_back(own, "last", None if known is None else Version(known, "a"))
    write(tmp_path, 0, 16, tag="last")
    assert sorted(version.step for version in versions(own, "last").values()) == left
    (own / "last" / MANIFEST).write_text("{")
    hold_back(own, "last", None)  # what cannot be read is passed over
    assert "last" not in versions(own, "last") and (12, "a") in versions(own, "last").values()
