"""Tensors and plain values on their way to a cluster that heals: in slices, each with its hash.

The head of a parcel says what is in it, with the hash of every slice. Clusters that hold the same
bits have the same head, so whoever has a head that more than half of them tell can take each slice
from any of them, and check it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LEAST_SLICE_BYTES = 1 << 18
_MOST_SLICES = 1 << 14  # a head travels in one message
_DIGEST_BYTES = 12
_AT_ONCE_BYTES = 1 << 20  # that are hashed while somebody waits


class Parcel:
    """What one rank gives; `tensors` are on the host, contiguous, and nobody else's."""

    def __init__(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._values = values
        self._tensors = {name: t for name, t in tensors.items() if t.numel()}
        self._bytes = [_bytes_of(t) for t in self._tensors.values()]
        self.num_bytes = sum(len(b) for b in self._bytes)
        least = -(-self.num_bytes // _MOST_SLICES)
        self._slice_bytes = max(LEAST_SLICE_BYTES, least)
        self._head: bytes | None = None
        self._thread: threading.Thread | None = None

    def head_soon(self) -> bytes | None:
        """Return the head, None while that of much is made, on another thread."""
        if self.num_bytes <= _AT_ONCE_BYTES:
            return self.head
        if self._thread is None:
            self._thread = threading.Thread(target=lambda: self.head, name="dsx-hash", daemon=True)
            self._thread.start()
        return self._head

    @property
    def head(self) -> bytes:
        """What is in it; reads all of it the first time."""
        if self._head is None:
            told = [[n, str(t.dtype)[6:], list(t.shape)] for n, t in self._tensors.items()]
            count = -(-self.num_bytes // self._slice_bytes)
            hashes = "".join(hash_of(self.slice(index)) for index in range(count))
            self._head = json.dumps(
                {"values": self._values, "tensors": told, "slice_bytes": self._slice_bytes,
                 "hashes": hashes}, sort_keys=True,
            ).encode()  # fmt: skip
        return self._head

    def slice(self, index: int) -> bytes:
        """Return the bytes of a slice; empty beyond the last one."""
        start = index * self._slice_bytes
        within = _within(self._bytes, start, self._slice_bytes)
        return b"".join(self._bytes[number][a:b] for number, a, b in within)


class Opened:
    """A parcel as it arrives: a place for each tensor, filled slice by slice."""

    def __init__(self, head: bytes) -> None:
        """ValueError for what is no head."""
        told = json.loads(head)
        self.values: dict[str, Any] = told["values"]
        self.slice_bytes: int = told["slice_bytes"]
        width, hashes = 2 * _DIGEST_BYTES, told["hashes"]
        self.hashes: Sequence[str] = [
            hashes[at : at + width] for at in range(0, len(hashes), width)
        ]
        self.tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in told["tensors"]
        }
        self._bytes = [_bytes_of(t) for t in self.tensors.values()]
        self.num_bytes = sum(len(b) for b in self._bytes)
        self._begun: set[int] = set()  # the numbers of tensors of which something is here
        self._number = {name: number for number, name in enumerate(self.tensors)}
        self.held_bytes = 0  # of slices that were here already
        if len(self.hashes) != -(-self.num_bytes // self.slice_bytes):
            raise ValueError(f"{len(self.hashes)} slices for {self.num_bytes} bytes")

    def begin_with(self, name: str, held: Tensor | None) -> None:
        """Start a tensor from what is here already, where that is one of the same shape."""
        place = self.tensors[name]
        if held is not None and held.shape == place.shape and held.dtype == place.dtype:
            place.copy_(held)
            self._begun.add(self._number[name])

    def length_if_held(self, index: int) -> int:
        """Return the bytes of a slice that is here already, as its hash says; 0 if it is not."""
        within = list(_within(self._bytes, index * self.slice_bytes, self.slice_bytes))
        if not self._begun.issuperset(number for number, _, _ in within):
            return 0
        data = b"".join(self._bytes[number][a:b] for number, a, b in within)
        return len(data) if hash_of(data) == self.hashes[index] else 0

    def put(self, index: int, data: bytes) -> bool:
        """Take a slice; False if it is not what its hash says."""
        if hash_of(data) != self.hashes[index]:
            return False
        taken, start = 0, index * self.slice_bytes
        for number, a, b in _within(self._bytes, start, self.slice_bytes):
            self._bytes[number][a:b] = data[taken : taken + b - a]
            taken += b - a
        return True


def hash_of(data: bytes) -> str:
    """Return the hash of a slice, in hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _within(
    buffers: Sequence[memoryview], start: int, length: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (number, from, to) of each buffer that a range of all of them, side by side, covers."""
    offset = 0
    for number, each in enumerate(buffers):
        a, b = max(start - offset, 0), min(start + length - offset, len(each))
        if a < b:
            yield number, a, b
        offset += len(each)
