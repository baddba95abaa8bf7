"""Page-locked host memory of exactly the size that is asked for, rounded up to whole pages.

torch's pinned allocator rounds every block up to a power of two: of buffers of gigabytes that can
be half as much again. Here pages of the operating system's are registered with the driver as they
are, which is all that copies beside the compute stream need.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsx.core.units import format_bytes

Register = Callable[[int, int], int]  # of an address and bytes; returns the driver's code, 0: done
Unregister = Callable[[int], object]


class PinnedMemory:
    """Gives page-locked memory, `[num_bytes]` uint8 and zero; it goes back with its tensors.

    `register` and `unregister` are the driver's.
    """

    def __init__(
        self, register: Register | None = None, unregister: Unregister | None = None
    ) -> None:
        self._register = register or _register
        self._unregister = unregister or _unregister

    def __call__(self, num_bytes: int) -> Tensor:
        """Return so many bytes; RuntimeError, with what to do, if they cannot be locked."""
        if not num_bytes:
            return torch.zeros(0, dtype=torch.uint8)
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = (ctypes.c_char * size).from_buffer(mmap.mmap(-1, size))
        address = ctypes.addressof(pages)
        code = int(self._register(address, size))
        if code:
            raise RuntimeError(
                f"{format_bytes(size)} of host memory cannot be page-locked (CUDA error "
                f"{code}): let processes lock more (ulimit -l, the container's memory), or keep "
                'less there: "state": {"device": "masters"}, or a cluster of more ranks'
            )
        # the last tensor over the pages lets go of them, which unregisters, and then unmaps them
        done = weakref.finalize(pages, self._unregister, address)
        done.atexit = False  # the driver may be gone by then
        return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)


def _register(address: int, num_bytes: int) -> int:
    driver: Any = torch.cuda.cudart()
    return int(driver.cudaHostRegister(address, num_bytes, 0))


def _unregister(address: int) -> None:
    driver: Any = torch.cuda.cudart()
    driver.cudaHostUnregister(address)
