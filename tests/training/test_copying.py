"""Copies beside training: all clusters copy the same checkpoints, one at a time, the newest."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dsx.checkpoint.checksums import UNFINISHED
from dsx.checkpoint.diverged import mark_diverged
from dsx.checkpoint.remote import Remote
from dsx.checkpoint.tags import complete_tags
from dsx.config.checkpoints import CheckpointsConfig, check_checkpoints, refuse_of_script
from dsx.config.files import ConfigError
from dsx.training import copying
from dsx.training.copying import Copying
from dsx.training.keeping import Keeping
from dsx.training.notices import Due
from tests.checkpoint.test_tags import write

URL = "guarded://run"
Told = list[tuple[str, int, int, str]]  # what, cluster, step, where or why


class Guarded(MemoryFileSystem):
    """What is written to a cluster's folder waits until it may, and fails where it is told to."""

    protocol = "guarded"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    may: dict[int, threading.Event] = {}
    fails: set[int] = set()

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        if mode == "wb":
            cluster = int(path.partition("cluster_")[2][0])
            assert Guarded.may[cluster].wait(20)
            if cluster in Guarded.fails:
                raise PermissionError(13, "no more of it", path)
        return super()._open(path, mode, *args, **options)


@pytest.fixture(autouse=True)
def guarded() -> Generator[None]:
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    Guarded.store, Guarded.pseudo_dirs = {}, [""]
    Guarded.may, Guarded.fails = {m: threading.Event() for m in range(2)}, set()
    yield
    for event in Guarded.may.values():
        event.set()


class Clusters:
    """Two clusters in one process, whose notices take effect at the next boundary."""

    def __init__(self, base: Path, is_ending: bool = False, **settings: Any) -> None:
        self.base, self.told = base, Told()
        self.posted: list[Due] = []
        self.due: list[dict[str, list[Due]]] = [{}, {}]
        config = CheckpointsConfig(remote=URL, **settings)
        self.remote = Remote(URL, "here")
        self.copying = [
            Copying(
                self._notices(m), lambda: self.members, self.remote, config, self._teller(m),
                lambda: is_ending,
            )
            for m in range(2)
        ]  # fmt: skip
        self.members = [0, 1]
        self.all = [
            Keeping(
                self._notices(m), lambda: self.members, True, config.keep, lambda path: None, one
            )
            for m, one in enumerate(self.copying)
        ]

    def _notices(self, cluster: int) -> Any:
        outer = self

        class Own:
            def __init__(self) -> None:
                self.cluster = cluster

            def post(self, kind: str, payload: Any) -> None:
                outer.posted.append(Due(0, kind, payload, cluster, 0))

            def due(self, kind: str) -> list[Due]:
                return outer.due[cluster].pop(kind, [])

            def take_back(self, kind: str, is_stale: Callable[[Any], bool]) -> None:
                outer.posted = [
                    due
                    for due in outer.posted
                    if not (due.kind == kind and due.cluster == cluster and is_stale(due.payload))
                ]
                held = outer.due[cluster]
                held[kind] = [due for due in held.get(kind, []) if not is_stale(due.payload)]

        return Own()

    def _teller(self, cluster: int) -> Any:
        told = self.told

        class Own:
            def copied(self, path: Path, step: int, url: str, *figures: float) -> None:
                told.append(("copied", cluster, step, url))

            def not_copied(self, path: Path, step: int, url: str, why: str) -> None:
                told.append(("not copied", cluster, step, why))

        return Own()

    def save(self, step: int, **told: Any) -> None:
        for m, keeping in enumerate(self.all):
            write(self.base, m, step, **told)
            keeping.saved(self.base / f"cluster_{m}" / told.get("tag", f"step{step}"), step)

    def pass_boundary(self) -> None:
        for due in self.due:
            for notice in self.posted:
                due.setdefault(notice.kind, []).append(notice)
        self.posted.clear()
        for keeping in self.all:
            keeping.pass_boundary()

    def pass_until(self, *told: tuple[str, int, int]) -> None:
        """Pass boundaries until all of this has been told."""
        until = time.monotonic() + 20
        while not {*told} <= {one[:3] for one in self.told}:
            assert time.monotonic() < until, self.told
            self.pass_boundary()
            time.sleep(0.002)

    def close(self) -> None:
        for keeping in self.all:
            keeping.close()

    @property
    def there(self) -> list[list[str]]:
        return [sorted(self.remote.tags(m)) for m in range(2)]


def allow(*clusters: int) -> None:
    for cluster in clusters:
        Guarded.may[cluster].set()


def test_what_was_written_again_before_its_copy_began_is_not_copied(tmp_path: Path) -> None:
    """Cluster 0 holds step 12 under that name by then, and cluster 1 step 8."""
    clusters = Clusters(tmp_path)
    clusters.save(4)
    clusters.pass_boundary()  # whose copies wait
    clusters.save(8, tag="last")
    clusters.pass_boundary()
    write(tmp_path, 0, 12, tag="last")
    allow(0, 1)
    clusters.pass_until(("copied", 0, 4), ("copied", 1, 4), ("copied", 1, 8))
    assert "last" not in clusters.there[0]
    clusters.close()


def test_all_copy_the_same_and_the_newest_where_a_line_is_slow(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path)
    clusters.save(10)
    clusters.pass_boundary()  # both begin
    allow(0)
    for step in (20, 30, 40):
        clusters.save(step)
        clusters.pass_boundary()
    clusters.pass_until(("copied", 0, 10))
    for _ in range(5):
        clusters.pass_boundary()
    assert clusters.there == [["step10"], []]  # and training has gone on
    allow(1)
    clusters.pass_until(("copied", 0, 40), ("copied", 1, 40))
    assert clusters.there == [["step10", "step40"]] * 2
    assert clusters.told[-1][3].startswith("guarded://run/cluster_")
    clusters.close()
    assert clusters.there == [["step10", "step40"]] * 2  # the last was there


def test_a_copy_keeps_to_its_rate_and_says_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "dsx")
    monkeypatch.setattr("dsx.core.progress.SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(copying, "Progress", partial(copying.Progress, first_seconds=0.0))
    clusters = Clusters(tmp_path, remote_rate_mbit=40.0)
    allow(0, 1)
    for m in range(2):
        write(tmp_path, m, 10)
        (tmp_path / f"cluster_{m}" / "step10" / "weights").write_bytes(bytes(4 << 20))
        clusters.all[m].saved(tmp_path / f"cluster_{m}" / "step10", 10)
    began = time.monotonic()
    clusters.pass_until(("copied", 0, 10), ("copied", 1, 10))
    assert time.monotonic() - began > 3 * 8.39e6 / 40e6  # the first MiB goes at once
    assert "copying to guarded://run/cluster_1/step10: 3.15 MB of 4.19 MB, " in caplog.text
    clusters.close()


def test_one_that_fails_is_told_and_the_next_is_tried(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path)
    allow(0, 1)
    Guarded.fails = {1}
    clusters.save(10)
    clusters.pass_until(("copied", 0, 10), ("not copied", 1, 10))
    assert "PermissionError: [Errno 13] no more of it" in clusters.told[-1][3] or (
        "no more of it" in clusters.told[-2][3]
    )
    Guarded.fails = set()
    clusters.save(20)
    clusters.pass_until(("copied", 0, 20), ("copied", 1, 20))
    assert clusters.there == [["step10", "step20"], ["step20"]]
    clusters.close()


def test_as_many_stay_there_as_on_the_disk(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path, keep=2)
    allow(0, 1)
    for step in (10, 20, 30, 40):
        clusters.save(step)
        clusters.pass_until(("copied", 0, step), ("copied", 1, step))
    clusters.pass_boundary()
    clusters.close()
    assert clusters.there == [["step30", "step40"]] * 2
    assert [sorted(complete_tags(tmp_path / f"cluster_{m}")) for m in range(2)] == clusters.there


def test_what_is_being_copied_stays_on_the_disk(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path, keep=1)
    clusters.save(10)
    clusters.pass_boundary()
    for step in (20, 30):
        clusters.save(step)
        clusters.pass_boundary()
    for keeping in clusters.all:
        assert keeping._thread is not None
        keeping._thread.join(20)
    assert sorted(complete_tags(tmp_path / "cluster_1")) == ["step10", "step30"]
    allow(0, 1)
    clusters.pass_until(("copied", 0, 30), ("copied", 1, 30))
    clusters.close()


def test_the_end_waits_for_the_last_one_and_no_longer_than_it_may(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path)
    allow(0, 1)
    clusters.save(10, is_finished=True)  # nobody hears of it any more
    clusters.close()
    assert clusters.there == [["step10"]] * 2
    late = Clusters(tmp_path / "late", remote_end_seconds=0.05)
    Guarded.may = {m: threading.Event() for m in range(2)}
    late.save(20)
    began = time.monotonic()
    late.close()
    assert time.monotonic() - began < 5 and late.there == [["step10"]] * 2
    told = Clusters(tmp_path / "told", is_ending=True)
    told.save(30)
    told.close()
    assert told.told == []


def test_what_is_saved_again_as_finished_while_it_is_copied_goes_too(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path)
    clusters.save(10)
    clusters.pass_boundary()
    clusters.save(10, is_finished=True)
    allow(0, 1)
    clusters.close()
    for m in range(2):
        assert clusters.remote.tags(m)["step10"]["is_finished"]
    assert [one[:3] for one in clusters.told] == [("copied", 0, 10), ("copied", 1, 10)]


@pytest.mark.parametrize("is_finished", [True, False])
def test_the_interpreter_waits_for_a_finished_model(tmp_path: Path, is_finished: bool) -> None:
    clusters = Clusters(tmp_path)
    allow(0, 1)
    clusters.save(10, is_finished=is_finished)
    for one in clusters.copying:
        one.close()
    assert clusters.there == ([["step10"]] * 2 if is_finished else [[], []])


def test_what_has_diverged_says_so_there_and_is_not_copied_any_more(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path)
    allow(0, 1)
    clusters.save(10)
    clusters.pass_until(("copied", 0, 10), ("copied", 1, 10))
    clusters.save(20)
    for m, keeping in enumerate(clusters.all):
        for tag in mark_diverged(tmp_path / f"cluster_{m}", 5, "a"):
            keeping.marked(tmp_path / f"cluster_{m}" / tag)
    clusters.close()
    for m in range(2):
        troubles = {tag: told["trouble"] for tag, told in clusters.remote.tags(m).items()}
        assert troubles == {"step10": "diverged since step 5"}


def test_a_cluster_that_is_lost_holds_nobody_up(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path)
    allow(0)
    clusters.save(10)
    clusters.pass_until(("copied", 0, 10))
    clusters.save(20)
    clusters.pass_boundary()
    clusters.members = [0]
    clusters.pass_until(("copied", 0, 20))
    allow(1)
    clusters.close()


def test_another_directory_is_told_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clusters = Clusters(tmp_path / "one")
    allow(0, 1)
    clusters.save(10)
    write(tmp_path / "other", 0, 10)
    clusters.all[0].saved(tmp_path / "other" / "cluster_0" / "step10", 10)
    assert f"{tmp_path}/other/cluster_0/step10 is not copied" in caplog.text
    clusters.close()
    assert not list(tmp_path.rglob(f"*{UNFINISHED}"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"remote_rate_mbit": 5.0}, "has no effect without checkpoints.remote"),
        ({"remote_end_seconds": 5.0}, "has no effect without checkpoints.remote"),
        ({"remote": "bucket"}, "must be a URL"),
    ],
)
def test_settings_that_have_no_effect_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_checkpoints(CheckpointsConfig(**given))


def test_saves_of_a_script_are_its_own() -> None:
    refuse_of_script(CheckpointsConfig())
    with pytest.raises(ConfigError, match="remote='s3://b' has no effect here: the script"):
        refuse_of_script(CheckpointsConfig(remote="s3://b"))
    with pytest.raises(ConfigError, match="keep=2 has no effect here"):
        refuse_of_script(CheckpointsConfig(keep=2))


def test_clusters_may_have_places_of_their_own_but_all_have_one() -> None:
    near, far, none = (CheckpointsConfig(remote=url) for url in ("s3://a", "gs://b", None))
    assert near.common() == far.common() != none.common()
