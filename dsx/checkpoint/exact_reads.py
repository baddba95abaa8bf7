"""Tensors of a safetensors file: of each what is asked for is read of the disk, and nothing around.

A system reads ahead of who reads a mapped file, by as much as a disk or a network file system is
set to: 128 kB, or tens of MB. A rank that needs a slice of each tensor of others' files would so
read most of them, as all ranks would. Here it is told not to, and what is about to be read.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.checkpoint.weight_files import NAMES

_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_LENGTH_BYTES = 8
_libc = ctypes.CDLL(None)


class TensorFile:
    """A file that stays what it was as it was opened, whatever has its name since.

    OSError; ValueError for one that is not whole, or none.
    """

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        header = _read_header(path, size)
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._first = size - max((e["data_offsets"][1] for e in header.values()), default=0)
        self._entries = header
        self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        self._advise(mmap.MADV_RANDOM, 0, size)

    @property
    def names(self) -> list[str]:
        """The tensors' names."""
        return [*self._entries]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it. KeyError."""
        return tuple(self._entries[name]["shape"])

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Return a copy of a tensor, or of start..stop along its first dimension. KeyError."""
        entry, shape = self._entries[name], self.shape(name)
        dtype, begin = _DTYPES[entry["dtype"]], self._first + entry["data_offsets"][0]
        end = self._first + entry["data_offsets"][1]
        if start is not None:
            low, high, _ = slice(start, stop).indices(shape[0])
            row = prod(shape[1:]) * dtype.itemsize
            shape = (max(high - low, 0), *shape[1:])
            begin, end = begin + low * row, begin + max(low, high) * row
        self._advise(mmap.MADV_WILLNEED, begin, end)
        return self._bytes[begin:end].clone().view(dtype).view(shape)

    def _advise(self, advice: int, begin: int, end: int) -> None:
        """Tell the system of bytes begin..end; a hint, which it may pass over."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        place = ctypes.c_void_p(self._bytes.data_ptr() + first)
        _libc.madvise(place, ctypes.c_size_t(end - first), ctypes.c_int(advice))


def _read_header(path: Path, size: int) -> dict[str, Any]:
    """Return the header, of which every tensor lies in the file, one behind another."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise ValueError(
                f"a header of {length:,} bytes does not lie in a file of {size:,}: not whole"
            )
        header: dict[str, Any] = json.loads(file.read(length))
    try:
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        at = 0
        for entry in sorted(entries, key=lambda e: e["data_offsets"]):
            begin, end = entry["data_offsets"]
            num_bytes = prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize
            if begin != at or end - begin != num_bytes:
                raise ValueError("tensors do not lie one behind another: no safetensors")
            at = end
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its header is none of safetensors ({error!r})") from error
    if at != size - length - _LENGTH_BYTES:
        held = size - length - _LENGTH_BYTES
        raise ValueError(f"tensors of {at:,} bytes, and {held:,} in the file: not whole")
    return header
