"""A file of lines, read as it grows.

Whoever writes may be in the middle of a line, may be killed there, or may put a new file in the
place of the old one, as a run does that goes back to a checkpoint: then it is read anew. A line
longer than any that dsx writes is passed over and counted, so that none fills the memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

LONGEST_LINE = "1 MiB"  # a chunk
_MOST_CHUNKS = 64  # that are passed over at a time
_CHUNK_BYTES = 1 << 20  # at a time: readers of what was taken wait no longer than for one
_LONG_BYTES = 4 << 20  # a file that is looked at before it is read
_PLACES, _PLACE_BYTES = 512, 4096


@dataclass(frozen=True)
class Fresh:
    """Whole lines that are new; `is_anew`: what was read before is no longer in the file."""

    lines: list[bytes] = field(default_factory=list[bytes])
    is_anew: bool = False


class FollowedFile:
    """One file, which may not be there yet.

    `most_bytes` is how much of its end is read at first; None: all of it. `keeps_up`: and of what
    has come since, each time.
    """

    def __init__(self, path: Path, most_bytes: int | None = None, keeps_up: bool = False) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._is_anew = False
        self._keeps_up = keeps_up
        self._is_within = False  # a line of which nothing is wanted
        self.num_too_long = 0
        self.size_bytes = 0

    @property
    def read_bytes(self) -> int:
        """How much of it has been read, or passed over."""
        return self._offset

    def read(self) -> Fresh:
        """Return the next lines, at most a chunk of them; none where the file is not there."""
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                if self._is_other(about, file.fileno()):
                    self._offset, self._is_within = 0, False
                    self._is_anew = True  # until it could be read
                    self._pass_over(about.st_size)
                elif self._keeps_up:
                    self._count_passed_over(about.st_size, file.fileno())
                    self._pass_over(about.st_size)
                self._identity = about.st_dev, about.st_ino
                self.size_bytes = about.st_size
                fresh = Fresh(self._lines(file.fileno()), self._is_anew)
                self._is_anew = False
                return fresh
        except FileNotFoundError:
            return Fresh()

    def _pass_over(self, size: int) -> None:
        """Go on from near the end, and there from the next line on."""
        if self._most_bytes is not None and size - self._offset > self._most_bytes:
            self._offset = size - self._most_bytes - 1
            self._is_within = True

    def _count_passed_over(self, size: int, descriptor: int) -> None:
        """Count the next line if it is too long, and about to be passed over with more."""
        is_passed = self._most_bytes is not None and size - self._offset > self._most_bytes
        if is_passed and not self._is_within:
            text = os.pread(descriptor, _CHUNK_BYTES, self._offset)
            self.num_too_long += len(text) == _CHUNK_BYTES and b"\n" not in text

    def _is_other(self, about: os.stat_result, descriptor: int) -> bool:
        """Whether it is the first time, or another file, or one that was cut since."""
        if self._identity != (about.st_dev, about.st_ino) or about.st_size < self._offset:
            return True
        if self._is_within or not self._offset:
            return False
        return os.pread(descriptor, 1, self._offset - 1) != b"\n"

    def _lines(self, descriptor: int) -> list[bytes]:
        """Return whole lines, without what is left of one that is passed over."""
        for _ in range(_MOST_CHUNKS):  # of one line; the rest at the next look
            text = os.pread(descriptor, _CHUNK_BYTES, self._offset)
            start = 0
            if self._is_within:
                start = text.find(b"\n") + 1
                if not start:
                    self._offset += len(text)
                    if len(text) < _CHUNK_BYTES:
                        return []
                    continue
                self._is_within = False
            end = text.rfind(b"\n") + 1
            if end or len(text) < _CHUNK_BYTES:
                self._offset += end
                return text[start:end].splitlines()
            self._is_within = True
            self.num_too_long += 1
        return []


def objects_in(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among some lines."""
    for line in lines:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut off, by a killed run or a full disk; or nested without end
        if isinstance(found, dict):
            yield cast("dict[str, Any]", found)


def first_look(path: Path) -> list[bytes]:
    """Return lines from places all over a long file, in order; none of a short one.

    A file of gigabytes takes many seconds to read, and this some milliseconds.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _LONG_BYTES:
                return []
            found: list[bytes] = []
            for place in range(_PLACES):
                offset = (size - _PLACE_BYTES) * place // (_PLACES - 1)
                text = os.pread(file.fileno(), _PLACE_BYTES, offset)
                found += text[text.find(b"\n") + 1 : text.rfind(b"\n")].splitlines()
            return found
    except OSError:  # told of where the file is read
        return []
