"""One of the two factors of a matrix: its messages, block by block, and who gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dsx.compress.blocks import Block
from dsx.compress.factors import DownCodec, UpCodec
from dsx.compress.owners import up_bytes
from dsx.compress.wire.base import Kernels, Wire
from dsx.core.buffers import Buffers
from dsx.core.membership import Seat

_NEXT_SEED = 7_919


class Factor:
    """A factor `[r, length]` on its way to the owners of its blocks, and the means that come back.

    `max_rows` are sent at most. `messages`, uint8, one block behind another: what is sent, what
    comes of the blocks owned (a row for each other cluster), and the means. `roles` of work space:
    where its values lie, and where they are scaled, and others' decoded.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        max_rows: int,
        wire: Wire,
        seat: Seat,
        kernels: Kernels,
        buffers: Buffers,
        messages: tuple[Tensor, Tensor, Tensor],
        roles: tuple[str, str],
    ) -> None:
        self.blocks = blocks
        self.length = blocks[-1].stop
        self._own = [block for block in blocks if block.owner == seat.position]
        self._seat = seat
        self._wire = wire
        self._work = buffers.work
        lengths = {block.length for block in blocks}
        self._role, room = roles
        self._up = {k: UpCodec(wire, max_rows, k, kernels, buffers, room) for k in lengths}
        self._down = {k: DownCodec(k, wire.is_exact) for k in lengths}
        self._sent, self._received, self._mean = messages
        self.rows = self.rank = 0

    def encode(self, factor: Tensor, rank: int, seed: int) -> None:
        """Make the codes of this cluster's factor `[rows, length]`, of which `rank` come back.

        The factor is used up.
        """
        self.rows, self.rank = factor.shape[0], rank
        for index, (block, out) in enumerate(self._messages_up(self._sent, self.blocks)):
            part = factor[:, block.start : block.stop]
            self._up[block.length].encode(part, out, seed + _NEXT_SEED * index)

    def decode_own(self, out: Tensor) -> None:
        """Write what all decode of this cluster's codes to `out` `[rows, length]`."""
        for block, data in self._messages_up(self._sent, self.blocks):
            self._up[block.length].decode(data, out[:, block.start : block.stop])

    def sent_to(self, position: int) -> list[Tensor]:
        """Return this cluster's codes of the blocks that another one averages, or this one."""
        messages = self._messages_up(self._sent, self.blocks)
        return [data for block, data in messages if block.owner == position]

    def received_from(self, position: int) -> list[Tensor]:
        """Return a cluster's codes of the blocks that this one averages."""
        if position == self._seat.position:
            return self.sent_to(position)
        row = self._received[position - (position > self._seat.position)]
        return [data for _, data in self._messages_up(row, self._own)]

    def means(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield the blocks that this cluster averages with their means `[rows, block's length]`.

        Each in work space, good until the next: a sum in cluster order, divided.
        """
        num_clusters = self._seat.num_clusters
        received = [self.received_from(position) for position in range(num_clusters)]
        for block, copies in zip(self._own, zip(*received, strict=True), strict=True):
            mean = self._work(self._role, (self.rows, block.length))
            up = self._up[block.length]
            up.decode(copies[0], mean)
            for data in copies[1:]:
                up.decode_add(data, mean)
            yield block, mean.div_(num_clusters)

    def encode_mean(self, block: Block, mean: Tensor) -> None:
        """Make the codes of a block's mean `[rank, block's length]`, which everybody decodes."""
        message = next(data for each, data in self._messages_down() if each is block)
        self._down[block.length].encode(mean, message)

    def means_of(self, owner: int) -> list[Tensor]:
        """Return the codes of the means that a cluster makes: its to send, others' to receive."""
        return [data for block, data in self._messages_down() if block.owner == owner]

    def codes(self, out: Tensor) -> Tensor:
        """Write the codes of the mean to `out` `[rank, length]`; return the scales `[length]`."""
        scales = [
            self._down[block.length].decode(data, out[:, block.start : block.stop])
            for block, data in self._messages_down()
        ]
        return torch.cat(scales) if len(scales) > 1 else scales[0]

    def _messages_up(self, data: Tensor, blocks: Sequence[Block]) -> Iterator[tuple[Block, Tensor]]:
        return in_a_row(data, blocks, lambda block: up_bytes(self._wire, self.rows, block.length))

    def _messages_down(self) -> Iterator[tuple[Block, Tensor]]:
        sizes = {length: down.num_bytes(self.rank) for length, down in self._down.items()}
        return in_a_row(self._mean, self.blocks, lambda block: sizes[block.length])


def in_a_row(
    data: Tensor, blocks: Sequence[Block], num_bytes: Callable[[Block], int]
) -> Iterator[tuple[Block, Tensor]]:
    """Yield blocks with their messages, which lie one behind another in `data`, uint8."""
    start = 0
    for block in blocks:
        stop = start + num_bytes(block)
        yield block, data[start:stop]
        start = stop
