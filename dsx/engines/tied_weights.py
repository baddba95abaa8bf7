"""Tied weights of a pipeline, on several stages: decided upon once, the same bits everywhere.

A tied weight belongs to the first of its stages: it is in a fragment there and nowhere else, so it
travels once and is decided upon once. At every step boundary the owner tells the other stages, in
one number per weight, whether it has written it, and broadcasts it bit for bit if so. (Sent by
every stage it would travel several times, and the copies would diverge where stages decide
differently, from measured times, or code differently, their shards being cut at other places.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.core.waits import waiting_for
from dsx.engines.masters import Piece

_CHUNK = 1 << 24  # elements sent at a time


@dataclass
class TiedWeight:
    """One tied weight on this rank: the ranks of all its stages, and the piece that lies here."""

    name: str
    numel: int
    group: Any
    host_group: Any
    is_owner: bool
    fragment: int | None = None  # on its owner
    piece: Piece | None = None

    def pack(self, first: int, out: Tensor) -> None:
        """Write the owner's piece of elements from `first` on into `out`, in place; else zeros."""
        out.zero_()
        piece = self.piece.cut(first, first + out.numel()) if self.piece else None
        if self.is_owner and piece:
            start = piece.start - first
            out[start : start + piece.numel].copy_(piece.view())

    def unpack(self, first: int, values: Tensor) -> None:
        """Overwrite what lies here of elements from `first` on, in place."""
        piece = self.piece.cut(first, first + values.numel()) if self.piece else None
        if not self.is_owner and piece:
            start = piece.start - first
            piece.overwrite(values[start : start + piece.numel])


class TiedWeights:
    """The tied weights of this rank's stage; `device` is where collectives take tensors."""

    def __init__(self, tied_weights: Sequence[TiedWeight], device: torch.device) -> None:
        self._tied_weights = tied_weights
        self._device = device

    @property
    def replicas(self) -> set[str]:
        """The weights here that belong to another stage."""
        return {tied_weight.name for tied_weight in self._tied_weights if not tied_weight.is_owner}

    def locate(self, assignment: Sequence[Sequence[str]], pieces: Mapping[str, Piece]) -> None:
        """Record where this rank's pieces of the tied weights are.

        An element must be in one piece only of all the owner's ranks.
        """
        fragments = {name: index for index, names in enumerate(assignment) for name in names}
        for tied_weight in self._tied_weights:
            tied_weight.fragment = fragments.get(tied_weight.name)
            tied_weight.piece = pieces.get(tied_weight.name)

    def broadcast(self, written: Collection[int]) -> bool:
        """Broadcast the weights in these fragments between stages; return whether any came here.

        Collective over the stages that share a weight, whatever was written; all ranks of a stage
        get the same answer.
        """
        has_come = False
        for tied_weight in self._tied_weights:
            is_written = tied_weight.is_owner and tied_weight.fragment in written
            flag = torch.tensor([float(is_written)])
            with waiting_for(f"the stages that share {tied_weight.name}", None):
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=tied_weight.host_group)
            if flag.item():
                self._broadcast(tied_weight)
                has_come |= not tied_weight.is_owner
        return has_come

    def _broadcast(self, tied_weight: TiedWeight) -> None:
        """Send a weight from its owner's ranks to all others."""
        buffer = torch.empty(min(_CHUNK, tied_weight.numel), device=self._device)
        for first in range(0, tied_weight.numel, _CHUNK):
            values = buffer[: tied_weight.numel - first]
            tied_weight.pack(first, values)
            # one summand is not zero; as integers, so that every bit stays
            with waiting_for(f"the stages that share {tied_weight.name}", None):
                dist.all_reduce(values.view(torch.int32), group=tied_weight.group)
            tied_weight.unpack(first, values)
