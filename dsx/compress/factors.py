"""How the two factors of a low-rank mean travel.

Up, to the owner of a factor: each row of P^T or Q^T `[r, k]` (a direction; their sizes are the
singular values and differ by orders) is scaled by a power of two, exactly, and sent in groups.
Of a factor that is cut into blocks of columns (blocks.py) each block is a message of its own.
Down, from the owner to all: int8 codes with one bf16 scale per *column* of `[r, k]`, so that

    (P Q^T)_ij = sP_i * sQ_j * sum_r codeP_ri * codeQ_rj

whose sum is a GEMM of small integers: exact in fp32 while 127 * 127 * r < 2^24, so every cluster
gets the same bits on any hardware. Larger ranks are summed in blocks, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsx.compress.owners import SCALE_BYTES, down_bytes, rows_added, up_bytes
from dsx.compress.wire.base import Codec, Kernels, Wire
from dsx.compress.wire.parts import places_of
from dsx.core.buffers import Buffers

EXACT_RANK = 1024  # 127 * 127 * 1024 < 2^24


class UpCodec:
    """Codes of `[rows, length]`, rows <= max_rows, on their way to the owner.

    Values are scaled where they are, if they lie in a row; else in work space of the role `room`,
    which none lie in, and where some rows at a time are decoded that do not stay as they are.
    """

    def __init__(
        self,
        wire: Wire,
        max_rows: int,
        length: int,
        kernels: Kernels,
        buffers: Buffers,
        room: str = "scaled",
    ) -> None:
        self._room = room
        self._wire = wire
        self._length = length
        self._codec: Codec = wire.codec(max_rows * length, torch.device("cpu"), kernels, buffers)
        self._work = buffers.work

    def num_bytes(self, rows: int) -> int:
        """Return the size of a message of `rows` rows."""
        return up_bytes(self._wire, rows, self._length)

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        """Write the message of `x` `[rows, length]`, used up, to `out`."""
        rows = x.shape[0]
        if self._wire.is_exact:
            self._codec.encode(x.reshape(-1), out, seed)
            return
        largest = x.abs().amax(dim=1)
        exponents = torch.frexp(largest).exponent.clamp(-126, 126)
        out[:rows].view(torch.int8).copy_(exponents)
        scaled = x if x.is_contiguous() else self._work(self._room, tuple(x.shape))
        torch.ldexp(x, -exponents.unsqueeze(1), out=scaled)
        self._codec.encode(scaled.view(-1), out[rows:], seed)

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values of a message to `out` `[rows, length]`, part of a factor or whole."""
        if out.is_contiguous():
            self._decode_rows(data, len(out), 0, out)
            return
        for rows, values in self._decoded(data, len(out)):
            out[rows].copy_(values)

    def decode_add(self, data: Tensor, out: Tensor) -> None:
        """Add the values of a message to `out` `[rows, length]`."""
        for rows, values in self._decoded(data, len(out)):
            out[rows].add_(values)

    def _decoded(self, data: Tensor, num_rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the values of some rows at a time, in work space."""
        together = rows_added(self._wire, num_rows, self._length)
        for start in range(0, num_rows, together):
            rows = slice(start, min(start + together, num_rows))
            values = self._work(self._room, (rows.stop - start, self._length))
            self._decode_rows(data, num_rows, start, values)
            yield rows, values

    def _decode_rows(self, data: Tensor, num_rows: int, start: int, out: Tensor) -> None:
        """Write the values of rows from `start` on, of a message of `num_rows`, to `out`."""
        codes_at = 0 if self._wire.is_exact else num_rows
        rows = slice(start, start + len(out))
        bounds = (self._length * n for n in (num_rows, rows.start, rows.stop))
        codes = [data[codes_at:][part] for part in places_of(self._wire, *bounds)]
        self._codec.decode(codes[0] if len(codes) == 1 else torch.cat(codes), out.view(-1))
        if not self._wire.is_exact:
            exponents = data[rows].view(torch.int8).to(torch.int32)
            torch.ldexp(out, exponents.unsqueeze(1), out=out)


class DownCodec:
    """int8 codes of a mean factor `[rows, length]` with a scale per column; or fp32, `is_exact`."""

    def __init__(self, length: int, is_exact: bool) -> None:
        self._length = length
        self._is_exact = is_exact

    def num_bytes(self, rows: int) -> int:
        """Return the size of a message of `rows` rows."""
        return down_bytes(self._is_exact, rows, self._length)

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Write the message of `x` `[rows, length]` to `out`."""
        if self._is_exact:
            out.copy_(x.contiguous().view(-1).view(torch.uint8))
            return
        scales = _rounded_up(x.abs().amax(dim=0).div_(127))
        codes = torch.where(scales > 0, x / scales, 0.0).round_().clamp_(-127, 127)
        split = self._length * SCALE_BYTES
        out[:split].copy_(scales.to(torch.bfloat16).view(torch.uint8))
        out[split:].view(torch.int8).copy_(codes.reshape(-1))

    def decode(self, data: Tensor, codes: Tensor) -> Tensor:
        """Write the codes to `codes` `[rows, length]`, fp32, and return the scales `[length]`.

        `codes` is part of a factor, or a whole one.
        """
        if self._is_exact:
            codes.copy_(data.view(torch.float32).view(codes.shape))
            return torch.ones(self._length)
        split = self._length * SCALE_BYTES
        codes.copy_(data[split:].view(torch.int8).view(codes.shape))
        scales = torch.empty(self._length, dtype=torch.bfloat16)
        scales.view(torch.uint8).copy_(data[:split])
        return scales.float()


def product(p: Tensor, q: Tensor, out: Tensor, room: Tensor | None = None) -> None:
    """Write `p^T q` of integer codes `[r, m]` and `[r, n]` to `out` `[m, n]`, the same anywhere.

    Above EXACT_RANK sums of a block are made in `room` `[m, n]`; None: in memory for the moment.
    """
    torch.mm(p[:EXACT_RANK].T, q[:EXACT_RANK], out=out)
    for start in range(EXACT_RANK, p.shape[0], EXACT_RANK):
        block = slice(start, start + EXACT_RANK)
        out.add_(torch.mm(p[block].T, q[block], out=room))


def _rounded_up(x: Tensor) -> Tensor:
    """Return positive values rounded up to bf16, as fp32."""
    bits = x.view(torch.int32).add(0xFFFF).bitwise_and_(-0x10000)
    return bits.view(torch.float32)
