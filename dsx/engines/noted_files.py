"""Files of `torch.distributed.checkpoint` whose checksums are noted as they are written.

What a rank has handed to the disk is what its checksum is of, and no file is read again for it. The
notes lie beside the files until the tag's manifest takes them in (checkpoint/checksums.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystem

from dsx.checkpoint.checksums import checksum, note_checksum

_HALF = ".tmp"  # torch writes its metadata under such a name, and renames it


def new_noting_writer(path: Path) -> Any:
    """Return a writer into a folder that leaves the SHA-256 of each file of this rank beside it."""
    of_torch: Any = filesystem
    writer = of_torch._FileSystemWriter(path)  # FileSystemWriter would be asked to copy, too
    writer.fs = _NotingFiles()
    return writer


class _NotingFiles(FileSystem):
    """Notes what is written to a file, once it is closed and has its name."""

    def __init__(self) -> None:
        super().__init__()
        self._half: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open a file; OSError if it, or its note, cannot be written."""
        with super().create_stream(path, mode) as file:
            stream = _Hashed(file)
            yield stream
        if mode != "wb":
            return
        where = Path(path)
        is_all = stream.num_bytes == where.stat().st_size  # nothing was written twice
        digest = stream.digest.hexdigest() if is_all else checksum(where)
        if where.suffix == _HALF:
            self._half[str(where)] = digest
        else:
            note_checksum(where, digest)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and note it under its name."""
        super().rename(path, new_path)
        note_checksum(Path(new_path), self._half.pop(str(path)))


class _Hashed:
    """An open file that takes the SHA-256 of what goes through it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest, self.num_bytes = hashlib.sha256(), 0

    def write(self, content: Any) -> int:
        """Write bytes, or a buffer of them."""
        self.digest.update(content)
        self.num_bytes += memoryview(content).nbytes
        return cast(int, self._file.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
