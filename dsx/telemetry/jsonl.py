"""A file of JSON lines that a resumed run goes on with: the records of steps taken again go.

It holds whole lines, whatever the disk does: what can be written in part only is taken back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from dsx.telemetry.appending import FLAGS, append_whole, is_open_at

logger = logging.getLogger(__name__)


class RecordFile:
    """Appends after the records up to `step`, where the others are dropped; None: after all.

    `head` is a line that goes before the first record. Nothing is opened or made before that.
    """

    def __init__(self, path: Path, step: int | None, head: str = "") -> None:
        self.path = path
        self._step = step
        self._head = head
        self._descriptor: int | None = None
        self._is_begun = False

    def append(self, text: str) -> None:
        """Write whole lines; OSError: none of them is in the file."""
        descriptor = self._open()
        gap = self._gap(os.fstat(descriptor).st_size)
        append_whole(descriptor, (gap + self._head + text).encode())
        self._head = ""

    def close(self) -> None:
        """Close; a later `append` opens it again, behind what it holds."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is not None and is_open_at(self.path, self._descriptor):
            return self._descriptor
        self.close()
        if not self._is_begun:  # later the folder is not made again: it may be where a disk was
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._step is not None:
                drop_beyond(self.path, self._step)
        self._descriptor = os.open(self.path, FLAGS, 0o666)
        self._is_begun = True
        return self._descriptor

    def _gap(self, size: int) -> str:
        """Return what ends a line that a killed run has left open."""
        assert self._descriptor is not None
        return "" if not size or os.pread(self._descriptor, 1, size - 1) == b"\n" else "\n"


def drop_beyond(path: Path, step: int) -> None:
    """Drop the records beyond a step, atomically; they stay where there is no space for that."""
    if not path.exists():
        return
    rewritten = path.with_suffix(".tmp")
    try:
        rewritten.write_text("".join(_lines_up_to(path, step)))
        rewritten.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            rewritten.unlink(missing_ok=True)
        logger.warning(
            "%s: the records beyond step %d stay (%s); of two of one step the later counts",
            path, step, error.strerror,
        )  # fmt: skip


def _lines_up_to(path: Path, step: int) -> list[str]:
    kept: list[str] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            logger.warning("dropping an incomplete record from %s", path)
            continue
        if record.get("step", record.get("applied_step", 0)) <= step:
            kept.append(line.decode())
    return kept
