"""Follows files that a run appends to: their last part first, then what has come since.

A file that is put in another's place, as where a run goes on from a checkpoint, is begun anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

_MOST_BYTES = 512 * 1024  # of a file's end that are looked at first, and of what has come since


class Follower:
    """The new whole lines of one file; a file that is not there has none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._at = 0
        self._rest = b""
        self.is_anew = False  # whether what was read before is in the file no more

    def lines(self) -> list[str]:
        """Return the lines that have come since the last call; of a long file its last ones."""
        self.is_anew = False
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except OSError:
            return []

    def _read(self, file: Any) -> list[str]:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._at:
            self._inode, self._at, self._rest = status.st_ino, 0, b""
            self.is_anew = True
        skips = status.st_size - self._at > _MOST_BYTES
        if skips:
            self._at, self._rest = status.st_size - _MOST_BYTES, b""
        file.seek(self._at)
        data = self._rest + file.read(status.st_size - self._at)
        self._at = status.st_size
        *whole, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in whole[1 if skips else 0 :]]

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects among the new lines."""
        for line in self.lines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # cut off, by a killed run or a full disk; or nested without end
            if isinstance(record, dict):
                yield cast("dict[str, Any]", record)
