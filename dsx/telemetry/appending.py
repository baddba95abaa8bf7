"""Files that others read while they grow: what is written is there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def append_whole(descriptor: int, data: bytes) -> None:
    """Write all of it at the end; OSError: the file is as long as it was."""
    size = os.fstat(descriptor).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def is_open_at(path: Path, descriptor: int) -> bool:
    """Whether the name still stands for the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
