"""A file of lines, read as it grows.

Whoever writes may be in the middle of a line, may be killed there, or may put a new file in the
place of the old one, as a run does that goes back to a checkpoint: then it is read anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

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

    `most_bytes` is how much of its end is read at first; None: all of it.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._is_anew = False
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
                    self._begin(about)
                    self._is_anew = True  # until it could be read
                self._identity = about.st_dev, about.st_ino
                self.size_bytes = about.st_size
                fresh = Fresh(self._lines(file.fileno()), self._is_anew)
                self._is_anew = False
                return fresh
        except FileNotFoundError:
            return Fresh()

    def _begin(self, about: os.stat_result) -> None:
        self._offset = 0
        if self._most_bytes is not None and about.st_size > self._most_bytes:
            self._offset = about.st_size - self._most_bytes

    def _is_other(self, about: os.stat_result, descriptor: int) -> bool:
        """Whether it is the first time, or another file, or one that was cut since."""
        if self._identity != (about.st_dev, about.st_ino) or about.st_size < self._offset:
            return True
        return self._offset > 0 and os.pread(descriptor, 1, self._offset - 1) != b"\n"

    def _lines(self, descriptor: int) -> list[bytes]:
        text = os.pread(descriptor, _CHUNK_BYTES, self._offset)
        end = text.rfind(b"\n") + 1
        if not end and len(text) == _CHUNK_BYTES:  # a line longer than a chunk
            text = os.pread(descriptor, self.size_bytes - self._offset, self._offset)
            end = text.rfind(b"\n") + 1
        self._offset += end
        return text[:end].splitlines()


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
