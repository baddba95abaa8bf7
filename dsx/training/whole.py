"""A folder of a library's that has tags of dsx's in it: one checkpoint, whole once all of it is.

The Trainer and Accelerate write files of their own around what dsx and the engine write. Once all
tags of such a folder are complete, which may be written beside training, and the library has
written its files on every rank, the folder gets a manifest (`dsx.json`) of its own: it names every
file, with its size, and says what those of the tags do. So it is one tag, with the library's files:
it can be copied to a remote place and fetched from there, whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dsx.checkpoint.checksums import MANIFEST, read_manifest, require_intact, take_checksums
from dsx.checkpoint.tags import write_durably


class Whole:
    """One rank's; the first one calls `prepare` before a folder is whole, and `complete` then.

    `failed` is told why a folder could not be made whole; it is not copied to a remote place.
    """

    def __init__(
        self,
        is_first: bool,
        prepare: Callable[[Path], object],
        complete: Callable[[Path, int], object],
        failed: Callable[[Path, str], object],
    ) -> None:
        self._is_first, self._prepare = is_first, prepare
        self._complete, self._failed = complete, failed
        self._folder: Path | None = None
        self._num_tags = 0
        self._tags: set[Path] = set()
        self._is_written = False  # whether the library has written what is its own

    def begin(self, folder: Path, num_tags: int) -> None:
        """Take that a save to a folder begins: what was whole there is not any more."""
        self._folder, self._num_tags = folder.absolute(), num_tags
        self._tags, self._is_written = set(), False
        if self._is_first:
            with suppress(OSError):  # what is saved there next will say so
                (folder / MANIFEST).unlink(missing_ok=True)

    def written(self) -> None:
        """Take that the library has written its files, on every rank of the cluster."""
        self._is_written = True
        self._complete_if_whole()

    def entered(self, tag: Path) -> None:
        """Take that a tag is complete, for the first time or once more."""
        if self._folder is not None and self._folder in tag.absolute().parents:
            self._tags.add(tag)
            self._complete_if_whole()

    def _complete_if_whole(self) -> None:
        folder = self._folder
        if folder is None or not self._is_first or not self._is_written:
            return
        if len(self._tags) < self._num_tags:
            return
        try:
            told = read_manifest(sorted(self._tags)[0] / MANIFEST)
            (folder / MANIFEST).unlink(missing_ok=True)
            self._prepare(folder)
            write_durably(folder / MANIFEST, json.dumps(take_checksums(folder, told)))
        except OSError as error:
            self._failed(
                folder,
                f"{folder} gets no manifest of its own ({error}): it is not copied to a remote "
                "place, and what is older stays; training goes on",
            )
            return
        self._complete(folder, told["step"])


def remove(folder: Path) -> None:
    """Delete a folder; killed meanwhile, it leaves nothing that looks complete. OSError."""
    with suppress(FileNotFoundError):
        unmark(folder)
        shutil.rmtree(folder)


def unmark(folder: Path) -> None:
    """Let nothing in a folder count as complete any more, before it is deleted."""
    for manifest in (folder / MANIFEST, *folder.rglob(MANIFEST)):
        manifest.unlink(missing_ok=True)


def find_inner_damage(folder: Path, rank: int, num_ranks: int) -> str | None:
    """Say what is wrong with the outer state of the tags in a folder; of `num_ranks`, a share."""
    try:
        for manifest in sorted(folder.rglob(MANIFEST)):
            if manifest.parent != folder:
                require_intact(manifest.parent, rank, num_ranks)
    except ValueError as error:
        return str(error)
    return None
