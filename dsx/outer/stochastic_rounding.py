"""Rounding to bf16 at random, the same everywhere: noise by a counter, not by a generator's state.

An fp32 `x` between two neighbours in bf16 becomes the upper one with the probability of its place
between them, so its mean is `x`, and many small additions to a large number are not lost, as they
are to the nearest one. Noise is 16 bits of a 32-bit mixer (MurmurHash3's last steps) of

    place in the whole parameter * 2^32 / golden ratio + key(buffer, parameter's name, round)

so it is the same in every cluster, on every device, after a resume, and however a parameter is cut
over ranks. What is in bf16 already stays as it is; what is not finite stays not finite.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.core.buffers import Buffers
from dsx.core.types import Fragment
from dsx.outer.memory import ROUNDED_TOGETHER as TILE

_STRIDE = 0x9E3779B1  # odd: 2^32 over the golden ratio


class StochasticRounding:
    """Rounds parts of a rank's fragments; `buffers` lend the work space. For one thread."""

    def __init__(self, fragments: Sequence[Fragment], buffers: Buffers) -> None:
        self._layouts = [[slot for slot in f.layout if slot.numel] for f in fragments]
        self._offsets = [[slot.offset for slot in layout] for layout in self._layouts]
        self._longest = min(max((f.numel for f in fragments), default=0), TILE)
        self._work = buffers.work
        self._places = torch.empty(0, dtype=torch.int32)

    def write(
        self, values: Tensor, out: Tensor, fragment: int, start: int, buffer: str, round: int
    ) -> None:
        """Round `values`, fp32 `[n]` and used up, into `out`, bf16 `[n]`.

        They are the elements from `start` on of a fragment's `buffer` after an outer round.
        """
        for first in range(0, values.numel(), TILE):
            part = slice(first, min(first + TILE, values.numel()))
            noise = self._noise(fragment, start + part.start, start + part.stop, buffer, round)
            inf = float("inf")  # a carry out of NaN would go into the sign, and leave zero
            tile = values[part].nan_to_num_(nan=inf, posinf=inf, neginf=-inf).view(torch.int32)
            out[part].view(torch.int16).copy_(tile.add_(noise).bitwise_right_shift_(16))

    def _noise(self, fragment: int, start: int, stop: int, buffer: str, round: int) -> Tensor:
        """Return a number of 16 bits for each element from `start` to `stop`, as int32."""
        if not self._places.numel():
            self._places = self._work("places of noise", (self._longest,), torch.int32)
            torch.arange(self._longest, out=self._places).mul_(_signed(_STRIDE))
        noise = self._work("noise", (stop - start,), torch.int32)
        shifted = self._work("shifted noise", (stop - start,), torch.int32)
        begins_in = bisect_right(self._offsets[fragment], start) - 1
        for slot in self._layouts[fragment][begins_in:]:
            if slot.offset >= stop:
                break
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, stop)
            place = slot.start + low - slot.offset
            first = _signed(place * _STRIDE + _key(buffer, slot.name, round))
            torch.add(self._places[: high - low], first, out=noise[low - start : high - start])
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            torch.bitwise_right_shift(noise, shift, out=shifted)
            noise.bitwise_xor_(shifted.bitwise_and_((1 << 32 - shift) - 1)).mul_(_signed(factor))
        return noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _key(buffer: str, parameter: str, round: int) -> int:
    text = f"{buffer}\n{parameter}\n{round}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def _signed(value: int) -> int:
    """Return the int32 of the lowest 32 bits."""
    value &= (1 << 32) - 1
    return value - (1 << 32) if value >> 31 else value
