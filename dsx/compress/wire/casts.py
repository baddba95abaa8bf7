"""The codec of formats that are a cast of each element: fp32 (exact), bf16, fp16.

A message is the elements in order, little-endian, 4 or 2 bytes each. A cast is one native pass,
so there is nothing to compile: its kernels are always "eager". It goes through tiles, because a
message may lie at any address and an operation on mixed types would allocate.

Rounding is to nearest, ties to even. fp16 saturates at +-65504 instead of turning into infinity;
bf16 has the range of fp32 (only what exceeds 3.39e38 becomes infinite).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsx.compress.wire.base import TILE, Kernels
from dsx.compress.wire.work_space import require_sizes
from dsx.core.buffers import Buffers
from dsx.core.checks import require_choice

FP16_MAX = 65504.0


class CastCodec:
    """`Codec` for one of torch's dtypes, by name, on one device; see base.py for the contract."""

    kernels = "eager"

    def __init__(
        self,
        dtype: str,
        numel: int,
        device: torch.device,
        kernels: Kernels,
        buffers: Buffers | None = None,
    ) -> None:
        require_choice("kernels", kernels, Kernels)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._numel = numel
        self._new = (buffers or Buffers(device)).work

    def encode(self, x: Tensor, out: Tensor, seed: int = 0) -> None:
        """Write the message of `x` to `out`; nothing is random, so `seed` has no effect."""
        require_sizes(x, out, self._numel, x.numel() * self._dtype.itemsize)
        for start in range(0, x.numel(), TILE):
            self._encode(x[start : start + TILE], self._part(out, start))

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values of `data` to `out`."""
        require_sizes(out, data, self._numel, out.numel() * self._dtype.itemsize)
        for start in range(0, out.numel(), TILE):
            out[start : start + TILE].copy_(self._sent(self._part(data, start)))

    def decode_add(self, data: Tensor, out: Tensor) -> None:
        """Add the values of `data` to `out`."""
        require_sizes(out, data, self._numel, out.numel() * self._dtype.itemsize)
        for start in range(0, out.numel(), TILE):
            out[start : start + TILE].add_(self._values(self._part(data, start)))

    def encode_with_feedback(self, x: Tensor, residual: Tensor, out: Tensor, seed: int = 0) -> None:
        """Add `residual` to `x`, write the message to `out` and the error to `residual`."""
        require_sizes(x, out, self._numel, x.numel() * self._dtype.itemsize)
        for start in range(0, x.numel(), TILE):
            own, error = x[start : start + TILE], residual[start : start + TILE]
            part = self._part(out, start)
            self._encode(own.add_(error), part)
            torch.sub(own, self._values(part), out=error)

    def _part(self, message: Tensor, start: int) -> Tensor:
        size = self._dtype.itemsize
        return message[start * size : (start + TILE) * size]

    def _encode(self, x: Tensor, part: Tensor) -> None:
        if self._dtype is torch.float16:
            clamped = self._new("value", (x.numel(),), torch.float32)
            x = torch.clamp(x, -FP16_MAX, FP16_MAX, out=clamped)
        if self._is_aligned(part):
            part.view(self._dtype).copy_(x)
        else:
            part.copy_(self._new("sent", (x.numel(),), self._dtype).copy_(x).view(torch.uint8))

    def _sent(self, part: Tensor) -> Tensor:
        """Return the elements as sent; copied, if they lie at an address that no load may use."""
        if self._is_aligned(part):
            return part.view(self._dtype)
        sent = self._new("sent", (part.numel() // self._dtype.itemsize,), self._dtype)
        sent.view(torch.uint8).copy_(part)
        return sent

    def _is_aligned(self, part: Tensor) -> bool:
        return part.storage_offset() % self._dtype.itemsize == 0

    def _values(self, part: Tensor) -> Tensor:
        sent = self._sent(part)
        if self._dtype is torch.float32:
            return sent
        return self._new("value", (sent.numel(),), torch.float32).copy_(sent)
