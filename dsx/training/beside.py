"""Saves that are written beside training: the outer state, its checksums, the tag's name.

What the engine writes is there already, and the outer state is held as it was (snapshot.py). A
thread writes it; the ranks then agree, over a group of their own, that all have, the first one
gives the tag its name, and they agree on that. A tag so is whole or not there, and no rank waits
for another but within a deadline. One save is under way at a time: the next one, a load and the end
of the run wait for it first. Training learns what became of it at the next boundary.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsx.checkpoint.leftovers import end_writing
from dsx.checkpoint.snapshot import Snapshot
from dsx.comm.in_cluster import InCluster
from dsx.comm.world import World
from dsx.core.at_exit import close_at_exit, has_closed
from dsx.core.units import format_bytes
from dsx.core.waits import waiting_for
from dsx.training.memory import free_on_host

LARGE = 64 << 20  # elements a rank, from which on a save is worth a thread
logger = logging.getLogger(__name__)


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
        is_wanted: bool | None,
        copied: Callable[[], int],
        saved: Callable[[Path, int], object],
        failed: Callable[[Path, str, int], object],
    ) -> None:
        """`is_wanted`: None where there is memory for it; `copied` says how much that is."""
        self._world, self._is_wanted, self._copied = world, is_wanted, copied
        self._is_told = False
        self._saved, self._failed = saved, failed
        self._snapshots: list[Snapshot] = []
        self._is_open = False
        self._in_cluster: InCluster | None = None
        self._thread: threading.Thread | None = None
        self._save: _Save | None = None

    def open(self, may_be_later: bool) -> None:
        """Begin a save of the engine; `wait` for the one before first. Collective in the cluster.

        It is written at once where the copies would take more than half of what a host has free.
        """
        self._snapshots.clear()
        self._is_open = False
        if not (self._is_wanted is not False and may_be_later):
            return
        copied, free = self._copied(), free_on_host()
        ranks = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), self._world.world_size)
        is_small = self._is_wanted or free is None or copied * ranks <= free // 2
        what = "whether a host has no memory for the copies of a save"
        self._is_open = not self._world.in_cluster().any(what, not is_small)
        if not is_small and not self._is_told:
            self._is_told = True
            logger.warning(
                "saves hold training up: the copies for one that is written beside it take up to "
                "%s on this host, of which %s are free; checkpoints.beside_training=true has it so "
                "all the same",
                format_bytes(copied * ranks), format_bytes(free or 0),
            )  # fmt: skip

    def write(self, snapshot: Snapshot) -> None:
        """Write a rank's outer state: now, or as a part of a save that is open."""
        if not self._is_open:
            snapshot.write()
            return
        snapshot.detach()
        self._snapshots.append(snapshot)

    def drop(self) -> None:
        """Take back what is open: it is not saved."""
        self._snapshots.clear()
        self._is_open = False

    def release(self, fragment: int) -> None:
        """Take that a fragment's anchor and outer optimizer are about to change."""
        for snapshot in self._snapshots:
            snapshot.release(fragment)

    def begin(self, final: Path, unfinished: Path, step: int, finish: Callable[[], None]) -> bool:
        """Go on with what is open on a thread; False if nothing is. Collective in the cluster.

        `finish` gives the tag its name, once all ranks have written to `unfinished`.
        """
        if not self._is_open:
            return False
        self._is_open = False
        if self._in_cluster is None:
            self._in_cluster = _new_group(self._world)
        close_at_exit(self)
        self._save = save = _Save(final, step, time.monotonic())
        self._thread = threading.Thread(
            target=self._run,
            args=(save, unfinished, finish, self._in_cluster),
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
        self._snapshots.clear()
        if save.trouble:
            self._failed(save.final, save.trouble, save.step)
        else:
            seconds = time.monotonic() - save.began
            if self._world.rank == 0:
                logger.info("%s is complete, %.1f s after it was begun", save.final, seconds)
            self._saved(save.final, save.step)

    def _run(
        self, save: _Save, unfinished: Path, finish: Callable[[], None], ranks: InCluster
    ) -> None:
        try:
            wrong = self._try(self._snapshots_written, ranks)
            if not wrong:
                wrong = self._try(finish if self._world.rank == 0 else lambda: None, ranks)
            if wrong and self._world.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
                end_writing(unfinished.parent)
        except Exception as error:  # noqa: BLE001 - a save that fails is no end of the run
            wrong = f"{type(error).__name__}: {error}"
        save.trouble = wrong and (
            f"checkpoint {save.final} is not saved: {wrong}; what was saved before is as it was, "
            "and training goes on"
        )

    def _snapshots_written(self) -> None:
        for snapshot in self._snapshots:
            snapshot.write()

    def _try(self, work: Callable[[], None], ranks: InCluster) -> str:
        """Do a part, and return what has failed on any rank."""
        trouble = None
        try:
            work()
        except OSError as error:
            trouble = f"{error.strerror or error} ({error.filename})"
        except ValueError as error:  # a file that is not as it was written
            trouble = str(error)
        return named(ranks.gather("a save beside training", trouble))


def named(everyone: Sequence[str | None]) -> str:
    """Return which ranks have failed, and why; "" if none has."""
    return "; ".join([f"rank {r}: {why}" for r, why in enumerate(everyone) if why][:4])


def is_large(fragment_numel: Sequence[int], num_ranks: int) -> bool:
    """Whether what each rank keeps is worth it; the same on all ranks."""
    return sum(fragment_numel) // num_ranks >= LARGE


def _new_group(world: World) -> InCluster:
    seconds = world.in_cluster_seconds
    store = world.connect_own_store("saves")
    return InCluster(world.cluster_id, world.rank, world.world_size, store, seconds, seconds)
