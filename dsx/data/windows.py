"""Fixed windows over Megatron's indexed format (.bin/.idx), read without Megatron.

Window i holds the tokens [i*L, i*L + L + 1) of the concatenated documents: L inputs and, shifted
by one, L targets. Neighbours share one token, so every token but the first is predicted exactly
once; a tail shorter than a window is dropped. Only the end-of-document id separates documents.

The .idx layout is megatron-core's: magic, version, dtype code, number of sequences, number of
document bounds, then lengths int32, byte offsets int64, document bounds int64 and, for multimodal
data, modes int8; all little endian. The .bin file is memory-mapped, so ranks of a host share it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsx.data.indexed import DTYPES, HEADER, MAGIC, VERSION

_TOKENS_AT_A_TIME = 2**22


class TokenWindows(Dataset[Tensor]):
    """Map-style dataset of int64 windows [sequence_length + 1] over `prefix`.bin and .idx."""

    def __init__(self, prefix: str | os.PathLike[str], sequence_length: int) -> None:
        """Open `prefix` (the path without .bin). Raises ValueError for files that are damaged."""
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length} must be at least 1; try 1024")
        self.prefix = os.fspath(prefix)
        self.sequence_length = sequence_length
        self.tokens = open_tokens(self.prefix)
        if len(self) < 1:
            raise ValueError(
                f"{self.prefix!r} holds {self.tokens.size} tokens, one window with "
                f"sequence_length={sequence_length} needs {sequence_length + 1}; use a shorter "
                "sequence_length or a larger corpus"
            )

    def __len__(self) -> int:
        """Return the number of whole windows."""
        return max(0, self.tokens.size - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Tensor:
        """Return window `index`, int64 [sequence_length + 1]."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is outside 0..{len(self) - 1}")
        start = index * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1]
        return torch.tensor(window.astype(np.int64))

    def shard_keys(self) -> npt.NDArray[np.int64]:
        """Return the sum of each window's inputs, [len]: prose, code and tables differ in it.

        Reads the whole corpus, some windows at a time.
        """
        length, at_a_time = self.sequence_length, max(1, _TOKENS_AT_A_TIME // self.sequence_length)
        keys = np.empty(len(self), dtype=np.int64)
        for first in range(0, len(self), at_a_time):
            last = min(first + at_a_time, len(self))
            tokens = self.tokens[first * length : last * length]
            keys[first:last] = tokens.reshape(-1, length).sum(axis=1, dtype=np.int64)
        return keys

    def __reduce__(self) -> tuple[type[TokenWindows], tuple[str, int]]:
        """Pickle the path: a DataLoader worker reopens the files, a memmap would be copied."""
        return TokenWindows, (self.prefix, self.sequence_length)


def open_tokens(prefix: str | os.PathLike[str]) -> npt.NDArray[np.integer]:
    """Memory-map the concatenated documents of `prefix`, [num_tokens], in the dtype on disk.

    Raises ValueError if a file is missing, truncated, or not in the indexed format.
    """
    index = _existing(f"{os.fspath(prefix)}.idx")
    data = _existing(f"{os.fspath(prefix)}.bin")
    dtype, num_tokens = _read_index(index)
    size, expected = data.stat().st_size, num_tokens * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"{str(data)!r} has {size} bytes, its index says {expected}; the file is truncated or "
            "belongs to another .idx: build or copy it again"
        )
    if num_tokens == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(data, dtype=dtype, mode="r")


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ValueError(
            f"{path!r} does not exist; give the path without .bin or .idx, or create the dataset "
            "with: dsx data build"
        )
    return Path(path)


def _read_index(path: Path) -> tuple[np.dtype[np.integer], int]:
    """Return the token dtype and the number of tokens that the .idx file describes."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = stream.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC:
        raise ValueError(
            f"{str(path)!r} starts with {header[: len(MAGIC)]!r}, an index with {MAGIC!r}; this "
            "is not Megatron's indexed format: build it with dsx data build"
        )
    if len(header) < HEADER.size:
        raise ValueError(f"{str(path)!r} is truncated in its header; build or copy it again")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(
            f"{str(path)!r} has index version {version}, only {VERSION} exists; build it again"
        )
    if code not in DTYPES:
        raise ValueError(
            f"{str(path)!r} has dtype code {code}, token ids need one of "
            f"{sorted(DTYPES)}; build it again from integer tokens"
        )
    dtype = np.dtype(DTYPES[code])
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size not in (expected, expected + num_sequences):  # the modes of multimodal data
        raise ValueError(
            f"{str(path)!r} has {size} bytes, its header says {expected}; the file is truncated: "
            "build or copy it again"
        )
    return dtype, _count_tokens(path, dtype.itemsize, num_sequences)


def _count_tokens(path: Path, itemsize: int, num_sequences: int) -> int:
    """Sum the lengths; raise ValueError unless the sequences lie end to end in the .bin."""
    if num_sequences == 0:
        return 0
    lengths = np.memmap(path, dtype="<i4", mode="r", offset=HEADER.size, shape=num_sequences)
    offsets_start = HEADER.size + 4 * num_sequences
    offsets = np.memmap(path, dtype="<i8", mode="r", offset=offsets_start, shape=num_sequences)
    num_tokens = int(lengths.sum(dtype=np.int64))
    if int(offsets[-1]) != (num_tokens - int(lengths[-1])) * itemsize:
        raise ValueError(
            f"{str(path)!r} points to sequences that do not lie end to end; build it again"
        )
    return num_tokens
