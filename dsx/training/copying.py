"""Copies of checkpoints at a remote place (`checkpoints.remote`), made beside training.

A good checkpoint that all clusters hold on their disks is copied by the first rank of each, on a
thread, one at a time. All copy the same one: the next is begun where all have told, beside a
transfer (notices.py), that they are done with the one before, and it is the newest that all hold by
then. So all have the same ones there, however unequal their lines, where none fails, and of
checkpoints that come faster than a line carries them the newest ones go. Where one cannot be
copied, training goes on, and the next is tried. As a run ends its last checkpoint is copied, for
which the end waits a while.

`checkpoints.keep` holds there, too: older ones go once all clusters have K newer ones there. What a
library has deleted on the disk goes there once all clusters have another one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dsx.checkpoint.checksums import MANIFEST, read_manifest
from dsx.checkpoint.places import Lies, by_cluster
from dsx.checkpoint.remote import Changed, Remote
from dsx.config.checkpoints import CheckpointsConfig
from dsx.core.at_exit import close_at_exit, has_closed
from dsx.core.progress import Progress
from dsx.core.waits import waiting_for
from dsx.outer.sources import Rate
from dsx.training.notices import Notices
from dsx.training.old_copies import OldCopies
from dsx.training.silent_copies import Silence

logger = logging.getLogger(__name__)
_KIND = "copied"
_LOOK_SECONDS = 0.5  # between two looks whether an engine has completed its part
_MARK_SECONDS = 30.0  # that an end waits for what has diverged to say so there, too


class Told(Protocol):
    """Who writes down what has become of a copy, on the training thread."""

    def copied(self, path: Path, step: int, url: str, num_bytes: int, seconds: float) -> None:
        """Take that a checkpoint is complete there."""
        ...

    def not_copied(self, path: Path, step: int, url: str, why: str) -> None:
        """Take that it is not, and why."""
        ...


@dataclass(frozen=True)
class _Copy:
    """A checkpoint to be copied; `key` is its tag and step, the same in all clusters."""

    path: Path
    step: int
    tag: str

    @property
    def key(self) -> tuple[str, int]:
        return self.tag, self.step


@dataclass(frozen=True)
class _Done:
    """How a copy has ended: `why` is "" if it is complete, None if it is of no use any more."""

    copy: _Copy
    num_bytes: int
    seconds: float
    why: str | None


class Copying:
    """The first rank's part of a cluster; `told` hears of each copy.

    `members` are the clusters that train; `is_ending` says whether the process is told to end, for
    which nothing is waited.
    """

    def __init__(
        self,
        notices: Notices,
        members: Callable[[], Collection[int]],
        remote: Remote,
        config: CheckpointsConfig,
        told: Told,
        is_ending: Callable[[], bool],
    ) -> None:
        self._notices, self._members, self._told = notices, members, told
        self._remote, self._config, self._is_ending = remote, config, is_ending
        self._old = OldCopies(remote, config.keep, notices.cluster)
        self._rate = Rate(config.remote_rate_mbit)
        self._lies: Lies = by_cluster  # where a checkpoint's cluster and tag stand in its path
        self._base: Path | None = None  # whose tags are there: one URL, one directory
        self._next: _Copy | None = None  # the newest that all clusters hold
        self._open: _Copy | None = None  # which all copy now
        self._waits_for: set[int] = set()
        self._has: dict[int, bool] = {}  # clusters that are done with it, and whether it is there
        self._silence = Silence(notices.cluster)
        self._marks: list[Path] = []  # tags whose manifests are still to be written there
        self._common: dict[str, int] = {}  # what all have there: steps by tag
        self._last: _Copy | None = None  # that this cluster has saved
        self._copied: set[tuple[str, int]] = set()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed, self._ends = False, threading.Event()  # the latter as the engine ends

    def take_places(self, lies: Lies) -> None:
        """Take where checkpoints lie on the disk, before the first is saved."""
        self._lies = self._remote.lies = lies

    def saved(self, path: Path, step: int) -> None:
        """Take a good checkpoint of this cluster, which is complete on its disk."""
        if self._is_of_base(path):
            self._last = _Copy(path, step, self._lies(path).tag)
            self._copied.discard(self._last.key)  # the same step may be saved again, finished
            self._old.saved(self._last.tag)

    def held_by_all(self, path: Path, step: int) -> None:
        """Take that all clusters have a good checkpoint on their disks; copy it, or after others.

        At the same boundary in all clusters.
        """
        if self._is_of_base(path):
            self._next = _Copy(path, step, self._lies(path).tag)
            self._begin_if_free()

    def holds(self, path: Path) -> bool:
        """Whether a checkpoint is being copied, and so has to stay; from any thread."""
        copy = self._open
        return copy is not None and copy.path == path

    def loaded(self, step: int) -> None:
        """Take that training goes on from there: copies of later steps make none superfluous."""
        self._common = {tag: of for tag, of in self._common.items() if of <= step}

    def gone(self, path: Path) -> None:
        """Take that a library has deleted a checkpoint on the disk; from any thread."""
        self._old.gone(self._lies(path).tag)

    def mark(self, path: Path) -> None:
        """Let the copy of a checkpoint say what its manifest does now, if there is one."""
        if self._next is not None and self._next.path == path:
            self._next = None
        if self._last is not None and self._last.path == path:
            self._last = None
        self._marks.append(path)
        self._do(partial(self._renew, path))

    def pass_boundary(self) -> None:
        """Tell what has become of copies, and listen; go on with the next where all are done."""
        self._take_done()
        for notice in self._notices.due(_KIND):
            key = (notice.payload["tag"], notice.payload["step"])
            if self._open is not None and key == self._open.key:
                self._has[notice.cluster] = notice.payload["is_there"]
                self._silence.told_by(notice.cluster)
        waits_for = self._waits_for & {*self._members()}
        if self._open is not None and waits_for <= self._has.keys():
            if all(self._has[cluster] for cluster in waits_for):
                self._common[self._open.tag] = self._open.step
                self._do(partial(self._delete, {**self._common}))
            self._open = None
            self._begin_if_free()
        elif self._open is not None:
            self._tell_of_silence(self._open, waits_for - self._has.keys())

    def end(self) -> None:
        """Copy the last checkpoint, unless that is done; wait for it, and for what was begun.

        At most `remote_end_seconds`, and not at all where the process is told to end.
        """
        if self._is_closed:
            return
        self._take_done()
        self._ends.set()
        if not self._is_ending():
            if self._last is not None and self._last.key not in self._copied:
                self._do(partial(self._copy, self._last))  # nothing goes over twice
            self._wait()
        self._stop()

    def close(self) -> None:
        """As the interpreter ends: `end` behind a finished model, else wait for nothing."""
        if self._last is not None and _is_finished(self._last.path):
            self.end()
        self._stop()

    def _stop(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._ends.set()
            has_closed(self)
            self._work.put(None)
            self._wait_for_marks()
            self._take_done()

    def _wait_for_marks(self) -> None:
        """Let what has diverged say so there, too: a copy under way ends at its next chunk."""
        if not self._marks or self._thread is None:
            return
        with waiting_for(f"marks of checkpoints at {self._remote.url}", _MARK_SECONDS):
            self._thread.join(_MARK_SECONDS)
        for path in sorted({*self._marks}):
            self._not_marked(path, f"nothing was heard of it for {_MARK_SECONDS:g} s")

    def _wait(self) -> None:
        if self._thread is None:
            return
        over, seconds = threading.Event(), self._config.remote_end_seconds
        self._work.put(over.set)
        with waiting_for(f"the last copies at {self._remote.url}", seconds):
            is_over = over.wait(seconds)
        if not is_over:
            logger.error(
                "%s: not all is copied after %g s (checkpoints.remote_end_seconds), and the run "
                "ends; what is complete there stays, and what is missing can be copied with "
                "`dsx agent --to` or by hand, dsx.json last", self._remote.url, seconds,
            )  # fmt: skip

    def _is_of_base(self, path: Path) -> bool:
        """Whether a tag lies where this run's others do; says so where it does not."""
        base, cluster, _ = self._lies(path)
        if not cluster.startswith("cluster_"):
            return False
        self._base = self._base or base
        if base != self._base:
            logger.warning(
                "%s is not copied: %s has those of %s, and tags of two directories might have one "
                "name", path, self._remote.url, self._base,
            )  # fmt: skip
        return base == self._base

    def _begin_if_free(self) -> None:
        if self._open is None and self._next is not None:
            self._open, self._next = self._next, None
            self._waits_for, self._has = {*self._members()}, {}
            self._silence.begin()
            self._do(partial(self._copy, self._open))

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            close_at_exit(self)
            self._thread = threading.Thread(target=self._run, name="dsx-copies", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _copy(self, copy: _Copy) -> None:
        if self._is_closed:
            return
        began, num_bytes, why = time.monotonic(), 0, ""
        try:
            self._wait_for_own_part(copy)
            total = self._remote.num_bytes(copy.path)
            url = self._remote.place_of(copy.path)
            progress = Progress(f"copying to {url}", total, True, is_waited_for=False)
            num_bytes = self._remote.copy(copy.path, partial(self._pace, progress))
        except (Changed, FileNotFoundError) as error:
            logger.info("%s is not copied: %s", copy.path, error)
            why = None
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            why = f"{type(error).__name__}: {error}"
        self._done.put(_Done(copy, num_bytes, time.monotonic() - began, why))

    def _wait_for_own_part(self, copy: _Copy) -> None:
        """Return once the engine has completed its part, which it may write beside training."""
        while not self._remote.is_complete_here(copy.path):
            if not copy.path.is_dir():
                raise Changed(f"{copy.path} was deleted meanwhile")
            if self._ends.wait(_LOOK_SECONDS) and not self._remote.is_complete_here(copy.path):
                raise OSError(f"the engine has not completed its own part of {copy.path}")
        if read_manifest(copy.path / MANIFEST).get("step") != copy.step:  # as others copy that
            raise Changed(f"{copy.path} was written again before")

    def _pace(self, progress: Progress, num_bytes: int) -> None:
        if self._is_closed:
            raise Changed("the run ends")
        self._rate.wait(num_bytes)
        self._silence.moved()
        progress.moved(num_bytes)

    def _take_done(self) -> None:
        while not self._done.empty():
            done = self._done.get()
            copy, why, url = done.copy, done.why, self._remote.place_of(done.copy.path)
            if why == "" and copy.key not in self._copied:
                self._copied.add(copy.key)
                self._told.copied(copy.path, copy.step, url, done.num_bytes, done.seconds)
            elif why:
                self._told.not_copied(copy.path, copy.step, url, why)
            if not self._is_closed:
                told: dict[str, Any] = {"tag": copy.tag, "step": copy.step}
                self._notices.post(_KIND, {**told, "is_there": why == ""})
                if self._open is not None and copy.key == self._open.key:
                    self._silence.is_done_here()

    def _tell_of_silence(self, copy: _Copy, waits_for: set[int]) -> None:
        seconds, own = self._silence.longer_than(waits_for), self._notices.cluster
        if seconds is None:
            return
        url = self._remote.place_of(copy.path)
        if own in waits_for:
            why = f"no byte has gone there for {seconds:.0f} s; all clusters wait for this copy"
            self._told.not_copied(copy.path, copy.step, url, why)
            return
        logger.warning(
            "%s: this cluster is done with it, and clusters %s have not said for %.0f s that they "
            "are; no other checkpoint is copied before, and their logs say whether their copies go "
            "on", url, sorted(waits_for), seconds,
        )  # fmt: skip

    def _delete(self, common: Mapping[str, int]) -> None:
        if not self._is_closed:
            self._old.delete(common)

    def _renew(self, path: Path) -> None:
        why = ""
        try:
            if self._remote.renew(path):
                logger.info("%s says so, too", self._remote.place_of(path))
        except Changed:
            pass  # it is gone from the disk, too
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            why = f"{type(error).__name__}: {error}"
        self._marks.remove(path)
        if why:
            self._not_marked(path, why)

    def _not_marked(self, path: Path, why: str) -> None:
        logger.error(
            "%s could not be marked (%s): delete it by hand, else a new start on another machine "
            "takes it", self._remote.place_of(path), why,
        )  # fmt: skip


def _is_finished(tag: Path) -> bool:
    manifest = tag / MANIFEST
    return manifest.is_file() and bool(read_manifest(manifest).get("is_finished"))
