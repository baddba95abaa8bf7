"""Messages of the largest elements of every chunk of a vector: what their codecs share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dsx.compress.wire.work_space import require_sizes
from dsx.core.buffers import Buffers


@dataclass(frozen=True)
class Block:
    """Chunks of one length: elements from `start`, entries kept from `kept_start` on."""

    num_chunks: int
    length: int
    k: int
    first_chunk: int
    start: int
    kept_start: int

    def elements(self, x: Tensor) -> Tensor:
        """Return the block's part of a vector, `[num_chunks, length]`."""
        stop = self.start + self.num_chunks * self.length
        return x[self.start : stop].view(self.num_chunks, self.length)

    def kept(self, entries: Tensor) -> Tensor:
        """Return the block's part of the entries kept, `[num_chunks, k]`."""
        stop = self.kept_start + self.num_chunks * self.k
        return entries[self.kept_start : stop].view(self.num_chunks, self.k)

    def scales(self, scales: Tensor) -> Tensor:
        """Return the block's scales, `[num_chunks, 1]`."""
        return scales[self.first_chunk : self.first_chunk + self.num_chunks].view(-1, 1)


class ChunkFormat(Protocol):
    """A `Wire` of the largest of every `chunk` elements."""

    @property
    def chunk(self) -> int:
        """Elements among which the largest are sought."""
        ...

    def num_kept_of(self, length: int) -> int:
        """Return how many of a chunk of that length are sent."""
        ...

    def num_bytes(self, numel: int) -> int:
        """Return the exact size of a message of `numel` elements."""
        ...


class ChunkCodec:
    """The part of a `Codec` that depends on chunks alone; see wire/base.py for the contract.

    Derived ones say `encode`, `encode_with_feedback`, and `_add`, which decodes.
    """

    def __init__(self, form: ChunkFormat, numel: int, buffers: Buffers) -> None:
        self._form = form
        self._numel = numel
        self._new = buffers.work

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values of `data` to `out`, zeros between them."""
        self._require_sizes(out, data)
        self._add(data, out.zero_())

    def decode_add(self, data: Tensor, out: Tensor) -> None:
        """Add the values of `data` to `out`."""
        self._require_sizes(out, data)
        self._add(data, out)

    @abstractmethod
    def _add(self, data: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add the values of `data`, times `sign`, to `out`; no position comes twice."""

    def _from_start(self, places: Tensor, numel: int) -> Tensor:
        """Turn places within chunks into places within the vector, in place."""
        for block in self._blocks(numel):
            chunks = torch.arange(block.num_chunks, device=places.device).view(-1, 1)
            block.kept(places).add_(chunks.mul_(block.length).add_(block.start))
        return places

    def _blocks(self, numel: int) -> Iterator[Block]:
        """Yield the full chunks as one block, the short last one as another."""
        form, chunk = self._form, self._form.chunk
        k, (full, rest) = form.num_kept_of(chunk), divmod(numel, chunk)
        if full:
            yield Block(full, chunk, k, first_chunk=0, start=0, kept_start=0)
        if rest:
            yield Block(1, rest, form.num_kept_of(rest), full, full * chunk, full * k)

    def _require_sizes(self, x: Tensor, data: Tensor) -> None:
        require_sizes(x, data, self._numel, self._form.num_bytes(x.numel()))


def pack_indices(indices: Tensor, out: Tensor) -> None:
    """Write 12-bit `indices` to `out`: the first of two in the low half of 24 bits."""
    pairs = F.pad(indices, (0, indices.numel() % 2)).view(-1, 2)
    words = (pairs[:, 0] | (pairs[:, 1] << 12)).view(torch.uint8).view(-1, 8)
    out.copy_(words[:, :3].reshape(-1)[: out.numel()])


def unpack_indices(data: Tensor, num_indices: int) -> Tensor:
    """Return what `pack_indices` wrote, int64 `[num_indices]`."""
    triples = F.pad(data, (0, -data.numel() % 3)).view(-1, 3).long()
    words = triples[:, 0] | (triples[:, 1] << 8) | (triples[:, 2] << 16)
    return torch.stack([words & 0xFFF, words >> 12], dim=1).view(-1)[:num_indices]
