"""Weights that several ranks of a Megatron cluster hold alike, beside data parallelism.

Megatron keeps both kinds equal by giving them the same gradients. Sent from every rank that holds
them they would travel several times, and diverge where codecs cut the shards at other places.
So each belongs to one rank, which broadcasts it bit for bit:

- what tensor-parallel ranks hold alike (norms, biases), by the first of them, whenever its fragment
  is written: they are of one stage, which decides as one;
- the copy of the embedding on a later stage, by the first (tied_weights.py): the head of the last
  one, or what predicts further tokens there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dsx.core.waits import waiting_for
from dsx.engines.cluster_collectives import gather_objects, new_groups
from dsx.engines.masters import Piece, has_values
from dsx.engines.megatron.parameters import EMBEDDING, Coordinates, Parameter
from dsx.engines.tied_weights import TiedWeight


class TensorParallelCopies:
    """What this rank holds as its tensor-parallel peers do, of the same data and context."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        assignment: Sequence[Sequence[str]],
        pieces: Mapping[str, Piece],
        place: Coordinates,
        device: torch.device,
    ) -> None:
        self._is_first = place.tensor[0] == 0
        self._device = device
        self._pieces: list[list[Piece]] = [[] for _ in assignment]
        self._group: Any = None
        if place.tensor[1] == 1:
            return
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._first_rank = dist.get_global_rank(self._group, 0)
        alike = {p.name for p in parameters if p.is_alike() and not p.is_tied_copy}
        for found, names in zip(self._pieces, assignment, strict=True):
            found += [pieces[name] for name in names if name in alike and name in pieces]
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


def find_tied_weights(parameters: Sequence[Parameter], place: Coordinates) -> list[TiedWeight]:
    """Return the tied embedding, where this rank holds it. Collective in the cluster.

    It makes a process group for each tensor-parallel rank: of the first stage and that of the copy.
    """
    holds = any(parameter.is_tied_copy for parameter in parameters)
    everyone = gather_objects((place, holds))
    if not any(holds for _, holds in everyone):
        return []
    found: list[TiedWeight] = []
    for slice_number in range(place.tensor[1]):
        ranks = [
            rank
            for rank, (other, is_copy) in enumerate(everyone)
            if other.tensor[0] == slice_number and (other.pipeline[0] == 0 or is_copy)
        ]
        groups = new_groups(ranks)
        if dist.get_rank() in ranks:
            is_owner = place.pipeline[0] == 0
            tied = next(
                p for p in parameters if (p.plain == EMBEDDING if is_owner else p.is_tied_copy)
            )
            found.append(TiedWeight(tied.name, tied.tensor.numel(), *groups, is_owner))
    return found


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
        piece.view().copy_(values[offset : offset + piece.numel])
        offset += piece.numel
