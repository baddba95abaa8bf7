"""What tensor-parallel ranks hold alike (norms, biases): of one of them, and the same bits in all.

Engines keep such parameters equal by giving them the same gradients. Sent from every rank that
holds them they would travel several times, and diverge where codecs cut the shards at other places.
So each belongs to the first of these ranks, which broadcasts it bit for bit whenever its fragment
is written: they are of one stage, which decides as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.core.waits import waiting_for
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.masters import Piece, has_values


class TensorParallelCopies:
    """What this rank holds as its tensor-parallel peers in `group` do, of the same data.

    `alike` are the names of what they hold alike, of which this rank may own no piece. Collective
    over `group`; ValueError unless all of it is the same on its ranks, before training.
    """

    def __init__(
        self,
        alike: Collection[str],
        assignment: Sequence[Sequence[str]],
        pieces: Mapping[str, Piece],
        group: Any,
        device: torch.device,
    ) -> None:
        self._group, self._device = group, device
        self._first_rank = dist.get_global_rank(group, 0)
        self._is_first = dist.get_rank(group) == 0
        self._pieces = [
            [pieces[name] for name in names if name in alike and name in pieces]
            for names in assignment
        ]
        self._require_alike({name: pieces[name] for name in sorted(alike) if name in pieces})

    def broadcast(self, fragments: Iterable[int]) -> None:
        """Take the first rank's masters of these fragments. Collective: all name the same ones."""
        for fragment in fragments:
            pieces = self._pieces[fragment]
            if pieces:
                values = torch.cat([piece.view() for piece in pieces]).to(self._device)
                with waiting_for(f"tensor-parallel copies of fragment {fragment}", None):
                    dist.broadcast(values, src=self._first_rank, group=self._group)
                if not self._is_first:
                    _write(pieces, values)

    def _require_alike(self, pieces: Mapping[str, Piece]) -> None:
        """Raise ValueError unless all tensor-parallel ranks hold the same, before training."""
        own = [(name, p.start, p.numel, bit_sum(p.view())) for name, p in pieces.items()]
        everyone = gather_objects(own, self._group)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                entries = [b[0] for a, b in zip(everyone[0], other, strict=False) if a != b]
                name = entries[0] if entries else "the number of parameters"
                raise ValueError(
                    f"{name} differs between tensor-parallel ranks 0 and {rank}, without being "
                    "marked as a slice (tensor_model_parallel): dsx cannot tell whose is right"
                )


def bit_sum(values: Tensor) -> int:
    """Return the sum of fp32 values' bits modulo 2**64: equal wherever the elements lie."""
    total = 0
    if not has_values(values):
        return total
    for part in values.detach().view(torch.int32).split(1 << 22):
        total += int(part.sum(dtype=torch.int64).item())
    return total % (1 << 64)


def _write(pieces: Sequence[Piece], values: Tensor) -> None:
    """Overwrite pieces, in place, with values one after another."""
    offset = 0
    for piece in pieces:
        piece.overwrite(values[offset : offset + piece.numel])
        offset += piece.numel
