"""Megatron's own part of a checkpoint: `<directory>/iter_<iteration>`, and the tracker beside it.

Megatron names an iteration in `latest_checkpointed_iteration.txt` once its part is whole, with
`--async-save` some time after the save began. One that it had begun and not ended is noted as a
run starts: it is none later on either, when the tracker names an iteration above it, unless
Megatron has written it anew by then or has named that iteration itself.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from dsx.checkpoint.checksums import UNFINISHED, of_text
from dsx.checkpoint.tags import sync_to_disk, write_durably
from dsx.engines.megatron_model.dist_checkpoint import TRACKER

NOT_ENDED = "dsx_not_ended.json"  # by tag, what such a folder held
logger = logging.getLogger(__name__)


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


def note_not_ended(directory: Path) -> None:
    """Note which iterations Megatron has begun and not named; on one rank, as a run starts.

    Nothing where the tracker cannot be read or names no iteration: then it says nothing of those
    that are there. Where the note cannot be written a line says what to do.
    """
    latest = latest_iteration(directory)
    if latest is not None:
        _note_above(directory, latest)


def _note_above(directory: Path, latest: int) -> None:
    """Note what is above an iteration; that one itself is no more noted, as Megatron names it."""
    there = {path.name: path for path in directory.glob("iter_*") if path.is_dir()}
    above = {
        tag: _content_of(path)
        for tag, path in there.items()
        if (i := iteration_of(tag)) is not None and i > latest
    }
    before = _not_ended(directory)
    kept = {tag: held for tag, held in before.items() if tag in there and tag != tag_of(latest)}
    if {**kept, **above} == before or not (above or tag_of(latest) in before):
        return
    try:
        write_durably(directory / NOT_ENDED, json.dumps({**kept, **above}))
    except OSError as error:
        if above:
            logger.warning(
                "%s cannot be written (%s): delete %s by hand, which Megatron has not ended",
                directory / NOT_ENDED, error, ", ".join(sorted(above)),
            )  # fmt: skip
        else:
            logger.warning(
                "%s cannot be written (%s): delete that file by hand, as it notes %s, which "
                "Megatron has ended", directory / NOT_ENDED, error, tag_of(latest),
            )  # fmt: skip


def _not_ended(directory: Path) -> dict[str, str]:
    try:
        return dict(json.loads((directory / NOT_ENDED).read_text()))
    except (OSError, ValueError):
        return {}


def _content_of(folder: Path) -> str:
    """Return what changes where a folder is written anew."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    told = [(str(p.relative_to(folder)), (s := p.stat()).st_size, s.st_mtime_ns) for p in files]
    return of_text(json.dumps(told))


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
        folder = self.folder(tag)
        if not is_named or not folder.is_dir():
            return False
        if iteration == latest:
            return True
        half = _not_ended(self._directory).get(folder.name)
        return half is None or half != _content_of(folder)

    def place(self, tag: str, fetched: Path) -> None:
        """Put what was fetched into Megatron's folder, and name the iteration if it is the newest.

        OSError where Megatron's part did not come with the tag.
        """
        if self.is_complete(tag):
            return
        if not fetched.is_dir():
            raise OSError(f"Megatron's part of {tag} is not there with it")
        latest = latest_iteration(self._directory)
        before = -1 if latest is None else latest
        _note_above(self._directory, before)  # which the tracker may come to be above
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
        if iteration is not None and iteration > before:
            write_durably(self._directory / TRACKER, str(iteration))
