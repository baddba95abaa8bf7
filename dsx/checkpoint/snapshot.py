"""One rank's outer state at one moment, on its way to a file of the safetensors format.

What training changes at once is copied (`detach`): what is under way, residuals, the policies'
buffers. Anchors and the outer optimizer's change only where a transfer is applied, so these are
written from where they lie, and the rest of a fragment's is copied where it is about to change
before it has been written (`release`). The file's checksum is taken as it is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from dsx.checkpoint.checksums import note_checksum
from dsx.checkpoint.weight_files import NAMES
from dsx.core.progress import SOON, Progress
from dsx.core.units import format_bytes

_CHUNK_BYTES = 16 << 20


class Snapshot:
    """What goes to `path`; `stays` are the names of what changes with a fragment's outer step."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str],
        stays: Mapping[str, int],
        tells: bool,
    ) -> None:
        self._path, self._metadata, self._tells = path, metadata, tells
        self._lock = Lock()
        self._tensors: dict[str, Tensor] = {}
        self._borrowed: set[str] = set()  # what is somebody else's
        for name, tensor in tensors.items():
            if tensor.numel():
                own = tensor.detach().to("cpu").contiguous()
                self._tensors[name] = own
                if own.data_ptr() == tensor.data_ptr():
                    self._borrowed.add(name)
        self._stays = {n: p for n, p in stays.items() if n in self._borrowed}
        self._order = sorted(
            self._tensors, key=lambda n: (-self._tensors[n].itemsize, n not in self._stays, n)
        )

    @property
    def num_bytes(self) -> int:
        """What it holds that is not written yet, and nobody else's."""
        with self._lock:
            return sum(t.nbytes for n, t in self._tensors.items() if n not in self._borrowed)

    def detach(self) -> None:
        """Copy all that changes before `release` tells of it: training is about to go on."""
        for name in self._borrowed - self._stays.keys():
            self._copy(name)

    def release(self, fragment: int) -> None:
        """Copy what has not been written of a fragment, whose outer step is about to change it."""
        with self._lock:
            for name, of in [*self._stays.items()]:
                if of == fragment:
                    del self._stays[name]
                    self._copy(name)

    def give_up(self) -> None:
        """Nothing to do: none is written before `write`."""

    def write(self) -> None:
        """Write it, durable and as a whole or not at all, with its checksum; once, by any thread.

        OSError says how much space is left there.
        """
        with _leaving_nothing_half(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._path.with_suffix(".tmp")
            header = self._header()
            size = len(header) + sum(tensor.nbytes for tensor in self._tensors.values())
            progress = Progress(f"writing {self._path}", size, self._tells, first_seconds=SOON)
            digest = hashlib.sha256()
            with unfinished.open("wb", buffering=0) as file:
                for chunk in chain([header], self._chunks()):
                    _write_all(file.fileno(), chunk)
                    digest.update(chunk)
                    progress.moved(len(chunk))
                os.fsync(file.fileno())
            unfinished.replace(self._path)
            note_checksum(self._path, digest.hexdigest())

    def _copy(self, name: str) -> None:
        self._tensors[name] = self._tensors[name].clone()
        self._borrowed.discard(name)

    def _header(self) -> bytes:
        entries: dict[str, object] = {"__metadata__": dict(self._metadata)}
        end = 0
        for name in self._order:
            tensor, begin = self._tensors[name], end
            end += tensor.nbytes
            entries[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _chunks(self) -> Iterator[memoryview]:
        """Yield all bytes; what may change meanwhile is copied, a chunk at a time."""
        for name in self._order:
            for start in range(0, self._tensors[name].nbytes, _CHUNK_BYTES):
                with self._lock:
                    whole = self._tensors[name].view(-1).view(torch.uint8)
                    part = whole[start : start + _CHUNK_BYTES]
                    part = part.clone() if name in self._stays else part
                yield memoryview(cast(Any, part.numpy()))
            with self._lock:
                self._stays.pop(name, None)
                self._borrowed.discard(name)
                self._tensors[name] = torch.empty(0)


def _write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def _leaving_nothing_half(path: Path) -> Generator[None, None, None]:
    """Remove the temporary file of a rank whose disk is full; the error names the disk's space."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            path.with_suffix(".tmp").unlink(missing_ok=True)
        why = error.strerror or str(error)
        with suppress(OSError):
            place = path.parent if path.parent.is_dir() else Path.cwd()
            why += f"; {format_bytes(shutil.disk_usage(place).free)} are free there"
        raise OSError(error.errno, why, str(path)) from error
