"""What a bench's driver and the ranks that it started say to each other: files, which survive both.

Imports nothing of dsx.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class RankLog:
    """A file of lines, each of one call: it stands whatever happens to the process behind it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, **fields: Any) -> None:
        """Write a line, with the time that no jump of a clock moves, one for all of a host."""
        line = json.dumps({"what": what, "at": time.monotonic(), **fields})
        os.write(self._file, line.encode() + b"\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines that a `RankLog` has written by now; one that is being written is not."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Orders:
    """What the driver wants, looked at between steps; `given` has what was ordered last."""

    def __init__(self, path: Path, **given: Any) -> None:
        self._path, self._stamp = path, 0
        self.given: dict[str, Any] = given

    def look(self) -> None:
        """Take what is new."""
        try:
            stamp = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if stamp != self._stamp:
            self._stamp = stamp
            self.given |= json.loads(self._path.read_text())
