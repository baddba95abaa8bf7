"""Saves written beside training: parts of a checkpoint, their checksums, the tag's name.

Parts are the outer state, held as it was (snapshot.py), and what else a save has handed over; what
an engine writes by itself is its own business. A thread writes them; the ranks then agree, over a
group of their own, that all have, the first one gives the tag its name, and they agree on that. A
tag so is whole or not there, and no rank waits for another but within a deadline. One save is under
way at a time: the next one, a load and the end of the run wait for it first. Training learns what
became of it at the next boundary.

Who deletes older checkpoints as soon as a save returns has that wait (keeping.py), or has the save
written at once (`refuse`), as has a script of several engines, whose saves are parts of one.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsx.checkpoint.leftovers import end_writing
from dsx.comm.in_cluster import InCluster
from dsx.comm.world import World
from dsx.core.at_exit import close_at_exit, has_closed
from dsx.core.waits import waiting_for

logger = logging.getLogger(__name__)


class Part(Protocol):
    """What of one rank goes to a file: a snapshot of its outer state, or what its engine trains."""

    def detach(self) -> None:
        """Copy what training is about to change, so that it can be written beside it."""
        ...

    def release(self, fragment: int) -> None:
        """Copy what has not been written of a fragment, which is about to change."""
        ...

    def write(self) -> None:
        """Return once it is written; OSError if it cannot be. From any thread."""
        ...

    def give_up(self) -> None:
        """Return once nothing is written any more of what is not wanted."""
        ...


@dataclass
class _Save:
    """One save under way; `trouble` is None until it is over, then "" or why it has failed."""

    final: Path
    step: int
    began: float
    trouble: str | None = None


class Beside:
    """One rank's; `saved` and `failed` are told of each on the training thread."""

    def __init__(
        self,
        world: World,
        is_wanted: bool,
        saved: Callable[[Path, int], object],
        failed: Callable[[Path, str, int], object],
    ) -> None:
        """`is_wanted`: the same on all ranks of the cluster."""
        self._world, self._is_wanted = world, is_wanted
        self._saved, self._failed = saved, failed
        self._part: list[Part] = []  # of the save that is open
        self._under_way: list[Part] = []
        self._is_open = self._is_broken = self._is_refused = False
        self._in_cluster: InCluster | None = None
        self._thread: threading.Thread | None = None
        self._save: _Save | None = None

    def refuse(self, why: str) -> None:
        """Write everything at once from now on; all ranks of the cluster call it."""
        if self._is_wanted and not self._is_refused and self._world.rank == 0:
            logger.warning(
                "checkpoints.beside_training is not for %s: its saves are written at once", why
            )
        self._is_refused = True

    def open(self, may_be_later: bool) -> None:
        """Begin a save of the engine; `wait` for the one before first. On all ranks together."""
        self._part, self._is_open = [], False
        if not (self._is_wanted and may_be_later) or self._is_refused:
            return
        if self._world.num_handles > 1:
            self.refuse("several engines in one script")
            return
        what = "whether saves can be agreed on beside training"
        if self._world.in_cluster().any(what, self._is_broken):
            self.refuse("a cluster whose ranks have lost touch in one, until it is started again")
            return
        self._is_open = True

    def write(self, part: Part) -> None:
        """Write a part of a checkpoint: now, or with the others of a save that is open.

        OSError where a copy cannot be made, which is told to the other ranks as what cannot be
        written is.
        """
        if not self._is_open:
            part.write()
            return
        try:
            part.detach()
        except Exception as error:  # no memory, or what is no copy's to make
            raise OSError(f"no copy for a save beside training: {error!r}") from error
        self._part.append(part)

    def drop(self) -> None:
        """Take back what is open: it is not saved."""
        for part in self._part:
            part.give_up()
        self._part, self._is_open = [], False

    def release(self, fragment: int) -> None:
        """Take that a fragment's anchor and outer optimizer are about to change."""
        for part in (*self._part, *self._under_way):
            part.release(fragment)

    def begin(self, final: Path, unfinished: Path, step: int, finish: Callable[[], None]) -> bool:
        """Go on with what is open on a thread; False if nothing is. Collective in the cluster.

        `finish` gives the tag its name, once all ranks have written to `unfinished`.
        """
        if not self._is_open:
            return False
        self._under_way, self._part, self._is_open = self._part, [], False
        if self._in_cluster is None:
            self._in_cluster = _new_group(self._world)
        close_at_exit(self)
        self._save = save = _Save(final, step, time.monotonic())
        self._thread = threading.Thread(
            target=self._run,
            args=(save, self._under_way, unfinished, finish, self._in_cluster),
            name="dsx-save",
            daemon=True,
        )
        self._thread.start()
        return True

    def pass_boundary(self) -> None:
        """Tell what has become of a save that is over."""
        if self._save is not None and self._save.trouble is not None:
            self._tell()

    def wait(self) -> None:
        """Return once nothing is under way; TimeoutError if that does not end."""
        if self._thread is None or self._save is None:
            return
        seconds, final = self._world.in_cluster_seconds, self._save.final
        with waiting_for(f"{final}, which is being written", seconds):
            self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(
                f"{final} has been written for {time.monotonic() - self._save.began:.0f} s, and is "
                "not done: look at that disk"
            )
        self._tell()

    def settle(self) -> None:
        """As `wait`, before a library's save begins, which says itself where that does not end."""
        with suppress(TimeoutError):
            self.wait()

    def wait_together(self) -> None:
        """As `wait`, but TimeoutError on all ranks where one does not end. Collective."""
        if not self._is_wanted:
            return  # on all ranks, whoever has been told of what by now
        trouble = None
        try:
            self.wait()
        except TimeoutError as error:
            trouble = str(error)
        if wrong := named(self._world.in_cluster().gather("the save under way", trouble)):
            raise TimeoutError(wrong)

    def close(self) -> None:
        """Return once nothing is under way, or the deadline is over."""
        has_closed(self)
        try:
            self.wait()
        except TimeoutError as error:
            logger.error("%s; the last checkpoint before it stays", error)

    def _tell(self) -> None:
        save, self._save, self._thread = self._save, None, None
        assert save is not None
        self._under_way = []
        if save.trouble:
            self._failed(save.final, save.trouble, save.step)
        else:
            seconds = time.monotonic() - save.began
            if self._world.rank == 0:
                logger.info("%s is complete, %.1f s after it was begun", save.final, seconds)
            self._saved(save.final, save.step)

    def _run(
        self,
        save: _Save,
        parts: Sequence[Part],
        unfinished: Path,
        finish: Callable[[], None],
        ranks: InCluster,
    ) -> None:
        def write() -> None:
            for part in parts:
                part.write()

        try:
            wrong = self._try(write, ranks)
            if not wrong:
                wrong = self._try(finish if self._world.rank == 0 else lambda: None, ranks)
            if wrong and self._world.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
                end_writing(unfinished.parent)
        except Exception as error:  # noqa: BLE001 - a save that fails is no end of the run
            self._is_broken = True  # the ranks do not reach each other any more
            wrong = f"{type(error).__name__}: {error}"
        save.trouble = wrong and (
            f"checkpoint {save.final} is not saved: {wrong}; what was saved before is as it was, "
            "and training goes on"
        )

    def _try(self, work: Callable[[], None], ranks: InCluster) -> str:
        """Do a part, and return what has failed on any rank."""
        trouble = None
        try:
            work()
        except OSError as error:
            trouble = f"{error.strerror or error} ({error.filename})"
        except Exception as error:  # noqa: BLE001 - the other ranks wait for what is told here
            trouble = f"{type(error).__name__}: {error}"
        return named(ranks.gather("a save beside training", trouble))


def named(everyone: Sequence[str | None]) -> str:
    """Return which ranks have failed, and why; "" if none has."""
    return "; ".join([f"rank {r}: {why}" for r, why in enumerate(everyone) if why][:4])


def _new_group(world: World) -> InCluster:
    seconds = world.in_cluster_seconds
    store = world.connect_own_store("saves")
    return InCluster(world.cluster_id, world.rank, world.world_size, store, seconds, seconds)
