"""Masters that every rank of a cluster holds, shared out: each does its part of the outer step.

Without ZeRO all ranks of a cluster have the same masters. If each of them synchronised all of
them, a site with n ranks would send everything n times over its slow link, and keep n copies of
the outer state. So rank r serves the r-th of n equal runs of every fragment as if it were a shard:
it sends, keeps and writes 1/n. What was written is brought together by one all-gather of the
fragment inside the cluster, whose links are fast; the copies have the same bits afterwards.

Runs are cut in the order of the assignment, through parameters, with the last one the shortest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.backends.base import Piece


class Shares:
    """The part of one rank, of `group`, in what all its ranks hold alike.

    `device` is where the group's collectives take tensors.
    """

    def __init__(
        self,
        assignment: Sequence[Sequence[str]],
        wholes: Mapping[str, Piece],
        group: Any,
        device: torch.device,
    ) -> None:
        self._group = group
        self._device = device
        self._count = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._runs = [
            -(-sum(wholes[name].numel for name in names) // self._count) for names in assignment
        ]
        self._wholes: list[list[tuple[int, Piece]]] = []
        self._own: list[list[tuple[int, Piece]]] = []
        self.pieces: dict[str, Piece] = {}
        for names, run in zip(assignment, self._runs, strict=True):
            placed = _in_a_row({name: wholes[name] for name in names})
            own = {
                name: (start + piece.start - rank * run, piece)
                for name, start, whole in placed
                if (piece := whole.cut(rank * run - start, (rank + 1) * run - start)) is not None
            }
            self._wholes.append([(start, whole) for _, start, whole in placed])
            self._own.append(list(own.values()))
            self.pieces.update({name: piece for name, (_, piece) in own.items()})
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def buffer_bytes(self) -> int:
        """Return what the gather of the longest fragment takes, its own part included."""
        return 0 if self._count == 1 else 4 * max(self._runs, default=0) * (self._count + 1)

    def bring_together(self, fragments: Iterable[int]) -> None:
        """Write every rank's part of these fragments to this rank's masters, too. Collective."""
        if self._count == 1:
            return
        if self._buffers is None:
            longest = max(self._runs)
            own = torch.zeros(longest, device=self._device)
            self._buffers = own, torch.zeros(longest * self._count, device=self._device)
        for fragment in fragments:
            run = self._runs[fragment]
            own, everyone = self._buffers[0][:run], self._buffers[1][: run * self._count]
            for offset, piece in self._own[fragment]:
                own[offset : offset + piece.numel].copy_(piece.view())
            dist.all_gather(list(everyone.split(run)), own, group=self._group)
            for offset, whole in self._wholes[fragment]:
                whole.view().copy_(everyone[offset : offset + whole.numel])


def _in_a_row(wholes: Mapping[str, Piece]) -> list[tuple[str, int, Piece]]:
    """Return `(name, first element, piece)` of a fragment's parameters, one after another."""
    placed: list[tuple[str, int, Piece]] = []
    start = 0
    for name, whole in wholes.items():
        placed.append((name, start, whole))
        start += whole.numel
    return placed
