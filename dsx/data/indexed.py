"""The files of Megatron's indexed format (.bin and .idx), written without Megatron.

The layout is that of megatron-core's IndexedDatasetBuilder, to the byte: windows.py describes it.
A sequence is a document here.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # of integers, by code
_SMALL = 65500  # ids from which on Megatron takes int32
_AT_A_TIME = 1 << 20


def dtype_for(vocab_size: int) -> np.dtype[np.integer]:
    """Return the type of the tokens on disk, as Megatron chooses it: uint16 or int32."""
    return np.dtype("<u2" if vocab_size < _SMALL else "<i4")


def write_index(path: Path, lengths: npt.NDArray[np.int32], dtype: np.dtype[np.integer]) -> None:
    """Write the .idx of documents of these lengths, [num_documents], that lie end to end."""
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    count = len(lengths)
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        file.write(lengths.astype("<i4").tobytes())
        start = 0
        for first in range(0, count, _AT_A_TIME):
            sizes = lengths[first : first + _AT_A_TIME].astype(np.int64) * dtype.itemsize
            ends = start + np.cumsum(sizes)
            file.write((ends - sizes).astype("<i8").tobytes())
            start = int(ends[-1])
        for first in range(0, count + 1, _AT_A_TIME):
            bounds = np.arange(first, min(first + _AT_A_TIME, count + 1), dtype="<i8")
            file.write(bounds.tobytes())
