"""Saves of one name in clusters that are out of step: what all hold of it stays, whoever dies."""

from __future__ import annotations

import random
import shutil
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.checkpoint import tags, written_again
from dsx.checkpoint.tags import complete_tags
from dsx.config.sections import MOST_CLUSTERS
from dsx.outer.notices import NoticeCarrier
from dsx.training.common_saves import CommonSaves
from dsx.training.keeping import Keeping
from dsx.training.notices import Notices
from tests.checkpoint.test_keep import Board
from tests.checkpoint.test_tags import chosen, write

Common = tuple[str, int] | None  # a start and a step


@pytest.fixture(autouse=True)
def on_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(path: Path) -> None:
        pass

    for module in (tags, written_again):
        monkeypatch.setattr(module, "sync_to_disk", sync)


class Run:
    """Two clusters that save `last`; each restart of all is a session of its own.

    `dead` are killed, `members` those who train; words that nobody has heard die with a restart.
    """

    def __init__(self, base: Path, keep: int | None = None) -> None:
        self.base, self.keep, self.num_starts = base, keep, 0
        self._start(0)

    def _start(self, step: int) -> None:
        self.num_starts += 1
        self.step, self.dead, self.members, self.board = step, set[int](), (0, 1), Board()
        self.all = [self._keeping(m) for m in range(2)]

    def _keeping(self, cluster: int) -> Keeping:
        def forget(path: Path) -> None:
            pass

        return Keeping(self.board.of(cluster), lambda: self.members, True, self.keep, forget)

    def save(self, outcomes: str, steps: int = 4) -> None:
        """By cluster: s(aved), f(ailed), k(illed before), d(ied behind it, and told nobody)."""
        self.step += steps
        for m, outcome in enumerate(outcomes):
            if outcome == "k":
                self.dead.add(m)
            if m in self.dead:
                continue
            own = self.base / f"cluster_{m}"
            self.all[m].make_way(own, "last", self.step)
            if outcome == "f":
                self.all[m].failed(own / "last", self.step)
                continue
            members = self.members if len(self.members) < 2 else ()
            write(self.base, m, self.step, f"{self.num_starts}", members=members, tag="last")
            if outcome == "s":
                self.all[m].saved(own / "last", self.step)
            else:
                self.dead.add(m)

    def hear(self) -> None:
        """Let words come, if nobody is waited for."""
        if not self.dead & {*self.members}:
            for m in self.members:
                self.all[m].pass_boundary()
                self.all[m].close()

    def restart(self) -> None:
        """Start all again, from what all hold, or anew."""
        found, step = self.found(), self.common()
        self._start(step[1] if step else 0)
        for m, path in enumerate(found):
            self.all[m].loaded(path, self.step)

    def lose(self) -> None:
        self.members = tuple(m for m in (0, 1) if m not in self.dead)

    def join(self) -> None:
        """Bring the lost one back, which has heard nothing of before."""
        for m in self.dead:
            for kind in ("saved", "unsaved", "common"):
                self.board.seen[m, kind] = len(self.board.posted)
            self.all[m] = self._keeping(m)
        self.dead, self.members = set(), (0, 1)

    def found(self) -> list[Path]:
        """What the clusters would load; nothing where they have nothing in common."""
        try:
            sources = chosen(self.base, None)
        except FileNotFoundError:
            return []
        return [self.base / f"cluster_{m}" / tag for m, tag in sources]

    def common(self) -> Common:
        for path in self.found():
            manifest = complete_tags(path.parent)[path.name]
            return manifest["session"], manifest["step"]
        return None

    def count(self, cluster: int) -> int:
        return len(complete_tags(self.base / f"cluster_{cluster}"))


@pytest.mark.parametrize("is_told", [True, False])
def test_a_cluster_that_is_back_keeps_what_the_others_say_that_all_held(
    is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two saves fail elsewhere before one is in all: without that word it keeps an older state."""
    if not is_told:
        monkeypatch.setattr(CommonSaves, "tell_who_is_back", lambda *of: None)
    run = Run(tmp_path)
    for _ in range(3):
        run.save("ss")
        run.hear()
    run.dead = {1}
    run.lose()
    run.hear()
    run.join()
    run.hear()  # the others see that it is back
    run.save("fs")
    run.hear()
    run.save("fs")
    run.hear()
    assert run.common() == ("1", 12 if is_told else 8)
    run.save("sk")
    assert run.common() == (("1", 12) if is_told else None)


@pytest.mark.parametrize("lost", [[], [5], range(0, MOST_CLUSTERS, 2)], ids=["all", "one", "half"])
def test_the_word_of_a_save_fits_however_many_clusters_there_are(
    lost: Collection[int], tmp_path: Path
) -> None:
    """Of all but one that is lost, and of every other one, where those between have to hold it."""
    trained = sorted({*range(MOST_CLUSTERS)} - {*lost})
    ranks: Any = SimpleNamespace(shard=(0, 1))
    carrier = NoticeCarrier(ranks)
    saves = CommonSaves(Notices(carrier, (0, 0), 1, None), lambda: trained)
    saves.tell(("last", 4), trained)  # raises nothing
    (told,) = [notice.payload["members"] for notice in carrier._unsaid]
    found = {m for first, last in told for m in range(first, last + 1)}
    assert found >= {*trained} and len(told) <= 128
    assert len(lost) > 1 or found == {*trained}


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize(
    ("first", "killed", "left"),
    [
        ("ss", "sk", 4),  # before its save
        ("ss", "sd", 4),  # between its save and its word; what was known before stays
        ("ss", "ss", 4),  # behind its word, which has not come
        ("sf", "sd", 8),  # the first that both have, and nobody knows
        ("sf", "ss", 8),
        ("fs", "ss", 8),
    ],
)
def test_a_cluster_that_is_killed_at_any_point_of_a_save_leaves_a_state_that_all_hold(
    first: str, killed: str, left: int, keep: int | None, tmp_path: Path
) -> None:
    run = Run(tmp_path, keep)
    run.save(first)
    run.hear()
    run.save(killed)
    for _ in range(2):  # how far the other comes before it waits
        run.save("sk")
    assert run.common() == ("1", left)
    run.restart()
    assert run.step == left
    for _ in range(2):
        run.save("sf")
        assert run.common() == ("1", left)


def test_a_start_anew_over_states_that_not_all_hold_keeps_its_own(tmp_path: Path) -> None:
    """Cluster 1 was killed before its first save, and has told nobody of the second run's first."""
    run = Run(tmp_path)
    run.save("sk", 3)
    run.save("sk", 3)
    assert run.common() is None
    run.restart()
    run.save("ss", 5)
    assert run.common() == ("2", 5)
    for _ in range(3):
        run.save("sk")
        assert run.common() == ("2", 5)


def test_what_was_saved_at_the_step_that_was_loaded_is_not_taken_for_what_all_hold(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.save("ss")
    run.hear()
    run.restart()
    run.save("sf", 0)
    for _ in range(2):
        run.save("sf")
        assert run.common() == ("1", 4)


def test_a_save_of_all_that_a_lost_cluster_has_not_told_of_is_not_what_all_hold(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.save("ss")
    run.hear()
    run.save("sk")
    run.lose()
    run.hear()  # the others' word of 8, which cluster 1 is to have, too
    run.all[0].make_way(tmp_path / "cluster_0", "last", 12)
    shutil.rmtree(tmp_path / "cluster_0" / "last.replaced", ignore_errors=True)  # killed behind it
    assert run.common() == ("1", 4)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_cluster_that_is_back_hides_nothing_by_a_state_of_the_same_name(
    lost: int, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    run.save("ss")
    run.hear()
    alone, back = ("ks", "sf") if lost == 0 else ("sk", "fs")
    run.save(alone)
    run.lose()
    run.save(alone)
    run.hear()
    assert run.common() == ("1", 12)
    run.join()
    for _ in range(3):
        run.save(back)
        run.hear()
        assert run.common() == ("1", 12)
    assert chosen(tmp_path, "last")[1 - lost][0] == 1 - lost
    run.save("ss")
    run.hear()
    run.save("ss")
    assert run.count(0) == run.count(1) == 2


def test_one_line_says_what_stays_while_nothing_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    for _ in range(5):
        run.save("ss")
    assert run.count(0) == 3
    for m in range(2):
        (line,) = [line for line in caplog.messages if f"cluster_{m}" in line]
        assert "what it held of step 4 stays as last.held.replaced until" in line


@pytest.mark.parametrize("is_elastic", [False, True])
def test_whatever_fails_and_whoever_dies_some_state_is_in_all_clusters(
    is_elastic: bool, tmp_path: Path
) -> None:
    """By chance, with words that come behind the next save, and a cluster that runs ahead."""
    num_common = 0
    for seed in range(80):
        run, chance = Run(tmp_path / f"{seed}", seed % 2 or None), random.Random(seed)
        before: Common = None
        num_unheard = num_ahead = 0
        for _ in range(8):
            move = chance.choice(["save"] * 5 + ["restart"])
            is_soon = is_elastic and chance.random() < 0.3  # lost, and back, before any save
            if run.dead and (num_ahead == 2 or len(run.dead) == 2 or is_soon):
                move = "restart"
                if is_elastic and len(run.dead) == 1:
                    move = "join" if len(run.members) == 1 else "lose"
            if move == "save":
                outcomes = "".join(chance.choices("sfkd", [6, 3, 1, 1])[0] for _ in range(2))
                run.save(outcomes, chance.choice([2, 4]))
                num_ahead += bool(run.dead)
                num_unheard += 1
                if num_unheard == 2 or chance.random() < 0.7:
                    run.hear()
                    num_unheard = 0
            else:
                getattr(run, move)()
                if move != "restart":
                    run.hear()  # a boundary, at which who trains has changed
                num_ahead = 0 if move != "join" else num_ahead
            common = run.common()
            assert common is not None or before is None, (seed, before)
            before = common
            num_common += common is not None
    assert num_common > 300


def test_a_cluster_fails_in_what_it_has_to_hold_and_has_not_told_of_in_its_turn() -> None:
    board = Board()
    own, other = (CommonSaves(board.of(m), lambda: (0, 1)) for m in range(2))
    own.tell(("last", 4), [0])  # while the other was away
    for step in (8, 12):
        own.tell(("last", step), [0, 1])
    other.tell(("last", 12), [0, 1])
    other.tell_failed(("last", 16))
    own.tell(("last", 16), [0, 1])
    assert own.hear() == [("last", 4), ("last", 12)]
    is_failing = own.failing("last")
    assert [step for step in (4, 8, 12, 16) if is_failing(step)] == [8, 16]
    other.tell(("last", 16), [0, 1])  # tried once more
    assert own.hear() == [("last", 16)] and not own.failing("last")(16)
    own.loaded(12)
    assert not own.failing("last")(16) and own.failing("last")(8)
