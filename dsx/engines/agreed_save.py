"""One checkpoint of a cluster, which all its ranks have saved or none.

A rank that cannot write (a full disk, a folder that is gone) goes on to where all ranks meet, so
that none waits for it in vain. There all raise the same `NotSaved`, of which the run is told once,
and what was written so far is removed. Training goes on: `survives` keeps it from ending the run.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from dsx.checkpoint.checksums import UNFINISHED
from dsx.checkpoint.leftovers import end_writing
from dsx.checkpoint.tags import NotSaved, begin_tag, complete_tags
from dsx.core.units import format_bytes
from dsx.engines.cluster_collectives import from_first, gather_objects
from dsx.training.handle import Handle

Given = TypeVar("Given")
_OF_TORCH = ("PytorchStreamWriter", "inline_container")  # its writer of archives, on a full disk
logger = logging.getLogger(__name__)


def survives(save: Callable[[], object]) -> bool:
    """Save; return whether that is done. One that cannot be written is no end of the run."""
    try:
        save()
    except NotSaved:
        return False
    return True


class AgreedSave:
    """A save to `directory / tag`; every rank of the cluster makes one, and so begins it."""

    def __init__(
        self,
        handle: Handle,
        directory: Path,
        tag: str,
        is_first: bool,
        may_be_later: bool = False,
    ) -> None:
        """`may_be_later`: whether the outer state may be written beside training."""
        self.final = directory / tag
        self.unfinished = directory / f"{tag}{UNFINISHED}"
        self._handle = handle
        self._is_first = is_first
        self._trouble: str | None = None
        self.has_put_back = False  # whether the first rank has given the tag what it held before
        with self.part():
            handle.beside.wait()
        handle.beside.open(may_be_later and not _is_ending(handle))
        with self.part():
            if is_first and self._trouble is None:
                self.has_put_back = handle.keeping.make_way(directory, tag, handle.step)
                begin_tag(directory, tag)
        from_first(None)  # nobody writes before

    @contextmanager
    def part(self) -> Generator[None, None, None]:
        """Do a part of it that no collective is in; a failure waits for `agree`."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            self.note(error)

    def do(self, save: Callable[[], object]) -> None:
        """Do a part, and agree on it. Collective."""
        with self.part():
            save()
        self.agree()

    def complete(self, finish: Callable[[], None]) -> None:
        """Let the first rank `finish` what all have written, which gives the tag its name.

        Now, or beside training, where the outer state is written there. Collective.
        """
        handle = self._handle
        if handle.beside.begin(self.final, self.unfinished, handle.step, finish):
            handle.preemption.follow(self.final)
            return
        self.do(finish if self._is_first else lambda: None)
        handle.saved(self.final)

    def of_script(self, ask: Callable[[], Given]) -> Given:
        """Return what the script's own code gives; where it fails, all ranks do. Collective.

        What it cannot write is `NotSaved`, anything else an error of the script.
        """
        given: list[Given] = []
        failure = None
        try:
            given.append(ask())
        except Exception as error:  # noqa: BLE001 - a script may raise anything
            failure = error
            if is_of_disk(error):
                self.note(error)
        own = None if failure is None or self._trouble else f"{type(failure).__name__}: {failure}"
        told = gather_objects(own)
        wrong = [f"rank {rank}: {why}" for rank, why in enumerate(told) if why]
        if wrong:
            self._give_up()
            self._handle.not_saved(self.final, "; ".join(wrong))
            raise RuntimeError(
                f"checkpoint {self.final} is not saved: what the script saves with it has failed: "
                f"{'; '.join(wrong[:4])}; what was saved before is as it was"
            ) from failure
        self.agree()
        return given[0]

    def note(self, error: Exception) -> None:
        """Keep the first failure of this rank."""
        if self._trouble is None:
            where = getattr(error, "filename", None)
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            self._trouble = f"{why} ({where})" if where else why

    def agree(self) -> None:
        """Return if all ranks have done their parts, else `NotSaved` on all. Collective."""
        try:
            self._agree()
        except NotSaved as error:
            self._handle.not_saved(self.final, str(error))
            raise

    def _agree(self) -> None:
        everyone = gather_objects(self._trouble)
        wrong = [f"rank {rank}: {why}" for rank, why in enumerate(everyone) if why]
        if not wrong:
            return
        room = from_first(_room(self.final.parent, self.unfinished) if self._is_first else "")
        self._give_up()
        raise NotSaved(
            f"checkpoint {self.final} is not saved: {'; '.join(wrong[:4])}; {room}; what was saved "
            "before is as it was, and training goes on: free some space, let checkpoints.keep "
            "delete old ones, or save elsewhere"
        )

    def _give_up(self) -> None:
        self._handle.beside.drop()
        if self._is_first:
            shutil.rmtree(self.unfinished, ignore_errors=True)
            end_writing(self.final.parent)
        from_first(None)  # nothing is left where a rank raises


def _is_ending(handle: Handle) -> bool:
    """Whether somebody waits for this save."""
    preemption = handle.preemption
    return handle.is_finished or preemption.is_saving or preemption.asked_saves.is_saving


def is_of_disk(error: Exception) -> bool:
    """Whether something could not be written: torch has no error of its own for that."""
    is_of_torch = isinstance(error, RuntimeError) and any(name in str(error) for name in _OF_TORCH)
    return is_of_torch or isinstance(error, OSError | SafetensorError)


def _room(directory: Path, unfinished: Path) -> str:
    """Say how much a disk has left, and how much a checkpoint takes."""
    try:
        return _measured_room(directory, unfinished)
    except OSError as error:  # the others wait for what this rank says
        return f"its disk tells nothing of its space ({error.strerror or error})"


def _measured_room(directory: Path, unfinished: Path) -> str:
    place = directory.resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    disk = place
    while not os.path.ismount(disk) and disk != disk.parent:
        disk = disk.parent
    free = format_bytes(shutil.disk_usage(place).free)
    last = last_tag(directory)
    told = f"{format_bytes(size_of(unfinished))} had been written"
    if last is not None:
        told = f"{last} takes {format_bytes(size_of(directory / last))}, and {told}"
    return f"the disk at {disk} has {free} free ({told})"


def last_tag(directory: Path) -> str | None:
    """Return the newest complete tag of a cluster's directory; None if there is none."""
    done = complete_tags(directory)
    return max(done, key=lambda tag: (done[tag].get("step", 0), tag), default=None)


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
