"""The codec of picked elements: of every chunk the largest, their places and values in int4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsx.compress.chunks import ChunkCodec, pack_indices, unpack_indices
from dsx.compress.wire.base import Kernels
from dsx.core.buffers import Buffers

if TYPE_CHECKING:
    from dsx.compress.random_top_k import PickedFormat


class PickedCodec(ChunkCodec):
    """`Codec` of picked elements.

    Values travel in the order of their places. Temporaries are as long as what is kept.
    """

    def __init__(
        self,
        form: PickedFormat,
        numel: int,
        device: torch.device,
        kernels: Kernels,
        buffers: Buffers | None = None,
    ) -> None:
        buffers = buffers or Buffers(device)
        super().__init__(form, numel, buffers)
        self._form: PickedFormat = form
        self._values = form.values.codec(form.num_kept(numel), device, kernels, buffers)

    @property
    def kernels(self) -> str:
        """Those of the values' codec."""
        return self._values.kernels

    def encode(self, x: Tensor, out: Tensor, seed: int = 0) -> None:
        """Write the message of `x` to `out`; nothing here is random, so `seed` has no effect."""
        self._require_sizes(x, out)
        kept = self._form.num_kept(x.numel())
        places = self._new("places", (kept,), torch.int64)
        values = self._new("kept", (kept,), torch.float32)
        magnitudes = torch.abs(x, out=self._new("magnitudes", tuple(x.shape), torch.float32))
        for block in self._blocks(x.numel()):
            largest = block.elements(magnitudes).topk(block.k).indices
            place = block.kept(places).copy_(largest.sort(dim=1).values)
            torch.gather(block.elements(x), 1, place, out=block.kept(values))
        sections = out.split(self._form.section_bytes(x.numel()))
        if self._form.has_bit_mask(x.numel()):
            pack_places(self._from_start(places, x.numel()), x.numel(), sections[0])
        else:
            pack_indices(places, sections[0])
        self._values.encode(values, sections[1])

    def encode_with_feedback(self, x: Tensor, residual: Tensor, out: Tensor, seed: int = 0) -> None:
        """Add `residual` to `x`, write the message to `out` and the error to `residual`."""
        self.encode(x.add_(residual), out)
        self._add(out, residual.copy_(x), sign=-1)

    def _add(self, data: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add the values of `data`, times `sign`, to `out`; no place comes twice."""
        sections = data.split(self._form.section_bytes(out.numel()))
        kept = self._form.num_kept(out.numel())
        if self._form.has_bit_mask(out.numel()):
            places = unpack_places(sections[0], out.numel())
        else:
            places = self._from_start(unpack_indices(sections[0], kept), out.numel())
        values = self._new("kept", (kept,), torch.float32)
        self._values.decode(sections[1], values)
        out.index_add_(0, places, values, alpha=sign)


def pack_places(places: Tensor, numel: int, out: Tensor) -> None:
    """Write a bit for each of `numel` elements to `out`, the first of eight in the lowest."""
    bits = torch.zeros(8 * out.numel(), dtype=torch.uint8, device=out.device)
    bits[places] = 1
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=out.device)
    torch.sum(bits.view(-1, 8).mul_(weights), dim=1, dtype=torch.uint8, out=out)


def unpack_places(data: Tensor, numel: int) -> Tensor:
    """Return the places that `pack_places` wrote, int64, ascending."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    bits = (data.view(-1, 1) >> shifts) & 1
    return bits.view(-1)[:numel].nonzero().view(-1)
