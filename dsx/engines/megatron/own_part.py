"""Megatron's own part of a checkpoint: `<directory>/iter_<iteration>`, and the tracker beside it.

Megatron names an iteration in `latest_checkpointed_iteration.txt` once its part is whole, with
`--async-save` some time after the save began.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dsx.checkpoint.checksums import UNFINISHED
from dsx.checkpoint.tags import sync_to_disk, write_durably
from dsx.engines.megatron_model.dist_checkpoint import TRACKER


def latest_iteration(directory: Path) -> int | None:
    """Return the iteration that Megatron would load; None if there is none, or a release."""
    try:
        text = (directory / TRACKER).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def tag_of(iteration: int) -> str:
    """Return the name of an iteration's folder, Megatron's and the outer state's."""
    return f"iter_{iteration:07d}"


def iteration_of(tag: str) -> int | None:
    """Return the iteration of a tag's name, `iter_<iteration>`; None if it is another name."""
    number = tag.removeprefix("iter_").split(".")[0]
    return int(number) if tag.startswith("iter_") and number.isdecimal() else None


class MegatronPart:
    """Megatron's parts below one directory, where it saves to."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def folder(self, tag: str) -> Path:
        """Return Megatron's folder of the iteration."""
        return self._directory / tag.split(".")[0]

    def is_complete(self, tag: str) -> bool:
        """Whether Megatron has named the iteration, or a later one, and still holds it."""
        latest, iteration = latest_iteration(self._directory), iteration_of(tag)
        is_named = latest is not None and iteration is not None and iteration <= latest
        return is_named and self.folder(tag).is_dir()

    def place(self, tag: str, fetched: Path) -> None:
        """Put what was fetched into Megatron's folder, and name the iteration if it is the newest.

        OSError where Megatron's part did not come with the tag.
        """
        if self.is_complete(tag):
            return
        if not fetched.is_dir():
            raise OSError(f"Megatron's part of {tag} is not there with it")
        folder, iteration = self.folder(tag), iteration_of(tag)
        arriving = folder.with_name(f"{folder.name}{UNFINISHED}")  # its disk may be another one
        for left in (folder, arriving):  # not complete
            shutil.rmtree(left, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(fetched, arriving)
        for path in (*arriving.rglob("*"), arriving):
            sync_to_disk(path)
        arriving.rename(folder)
        sync_to_disk(folder.parent)
        if iteration is not None and iteration > (latest_iteration(self._directory) or -1):
            write_durably(self._directory / TRACKER, str(iteration))
