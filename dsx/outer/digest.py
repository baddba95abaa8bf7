"""A digest of a vector's bits that no two different ones share: SHA-256 over the pieces' own.

The hash of the headers (bit_hash.py) finds flipped bits, but two differences may cancel in it (two
signs do, at odd places), and 64 bits are few. What decides that clusters begin from equal
weights must not be wrong once, whatever the weights: SHA-256 has no known pair that
collides, and chance needs 2^128 of them. It runs at 0.4 to 2 GB/s a core, on several.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

NUMBERS = 4  # int64 of a digest
_PIECE = 4 << 20  # elements hashed at a time by one thread; as many are copied from an accelerator
_THREADS = 8


class Digests:
    """Digests of vectors; a context, as it has threads."""

    def __init__(self) -> None:
        self._count = min(_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._count, "dsx-digest")

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()

    def of(self, x: Tensor) -> Tensor:
        """Return the digest of fp32 `[n]`, wherever it is, as int64 `[NUMBERS]` on the host."""
        whole = hashlib.sha256(str(x.numel()).encode())
        pieces = x.split(_PIECE) if x.numel() else ()
        for first in range(0, len(pieces), self._count):
            some = [piece.to("cpu") for piece in pieces[first : first + self._count]]
            for digest in self._threads.map(_sha256, some):
                whole.update(digest)
        return torch.frombuffer(bytearray(whole.digest()), dtype=torch.int64)


def _sha256(x: Tensor) -> bytes:
    return hashlib.sha256(x.view(torch.uint8).numpy().data).digest()
