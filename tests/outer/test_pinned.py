"""Page-locked memory: pages as asked for, registered and let go, or a word of what to do."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from dsx.core.buffers import Allocator, Buffers
from dsx.outer.pinned import PinnedMemory


class Driver:
    """The two calls, as CUDA's would be made; `code` is what registering answers."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.were_mapped: list[bool] = []
        self.memory = PinnedMemory(self.register, self.unregister)

    def register(self, address: int, num_bytes: int) -> int:
        self.registered[address] = num_bytes
        return self.code

    def unregister(self, address: int) -> None:
        self.were_mapped.append(is_mapped(address))
        del self.registered[address]


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def test_pages_are_locked_as_they_are_and_let_go_with_the_last_tensor() -> None:
    driver = Driver()
    x = Buffers(pages=driver.memory).zeros(3, 5 * mmap.PAGESIZE // 4 + 1)
    ((address, num_bytes),) = driver.registered.items()
    assert address % mmap.PAGESIZE == 0 and x.data_ptr() == address
    assert num_bytes == 16 * mmap.PAGESIZE  # torch would have rounded up to 2^17
    assert x.dtype == torch.float32 and not x.any()
    part = x[1, 3:7]
    del x
    gc.collect()
    assert driver.registered and part.add_(1).sum() == 4
    del part
    gc.collect()
    assert not driver.registered and driver.were_mapped == [True]


def test_nothing_is_locked_for_nothing() -> None:
    driver = Driver()
    assert Buffers(pages=driver.memory).zeros(0).numel() == 0 and not driver.registered


def test_what_cannot_be_locked_is_told_with_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"4.1 kB of host memory .* error 2\): .* \(ulimit -l"):
        Driver(code=2).memory(7)


def test_an_allocator_knows_what_is_held() -> None:
    allocator = Allocator()
    state, codes = allocator.buffers("anchor"), allocator.on_host("channels")
    state.zeros(10)
    codes.zeros(7, dtype="uint8")
    codes.work("scales", (4, 2), torch.bfloat16)
    codes.work("scales", (3, 2), torch.bfloat16)
    codes.work("scales", (6,))  # another dtype, another buffer
    assert allocator.given == {"anchor": 40, "channels": 7 + 16 + 24}
    codes.work("scales", (10,), torch.bfloat16)  # in the place of the one of eight
    assert allocator.given["channels"] == 7 + 20 + 24
    del codes
    gc.collect()
    assert allocator.given == {"anchor": 40, "channels": 0}
