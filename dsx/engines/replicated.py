"""Masters that every rank of a cluster holds, as shards: each does its part of the outer step.

Without ZeRO all ranks of a cluster have the same masters. If each of them synchronised all of
them, a site with n ranks would send everything n times over its slow link, and keep n copies of
the outer state. So rank r serves the r-th of n equal runs of every fragment as if it were a shard:
it sends, keeps and writes 1/n. What was written is all-gathered inside the cluster, whose links are
fast, a piece of every run at a time; the copies have the same bits afterwards.

Runs are cut in the order of the assignment, through parameters, with the last one the shortest.
What several ranks hold alike may be shards in turn (FSDP2 with replicas). Where some parameters are
held alike by other ranks than the rest (experts), each set is divided by itself (`ReplicaSets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.core.buffers import Buffers
from dsx.core.waits import waiting_for
from dsx.engines.masters import Piece

_CHUNK = 1 << 24  # elements of all ranks gathered at a time


class ReplicaShards:
    """The part of one rank, of `group`, in what all its ranks hold alike.

    `device` is where the group's collectives take tensors; what they take comes from `buffers`.
    """

    def __init__(
        self,
        assignment: Sequence[Sequence[str]],
        wholes: Mapping[str, Piece],
        group: Any,
        device: torch.device,
        buffers: Buffers | None = None,
    ) -> None:
        self._group = group
        self._device = device
        self._count = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._runs = [
            -(-sum(wholes[n].numel for n in names if n in wholes) // self._count)
            for names in assignment
        ]
        self._wholes: list[list[tuple[int, Piece]]] = []
        self.pieces: dict[str, Piece] = {}
        for names, run in zip(assignment, self._runs, strict=True):
            placed = _in_a_row({name: wholes[name] for name in names if name in wholes})
            first, last = self._rank * run, (self._rank + 1) * run
            own = {name: whole.cut(first - at, last - at) for name, at, whole in placed}
            self._wholes.append([(at, whole) for _, at, whole in placed])
            self.pieces.update({name: piece for name, piece in own.items() if piece is not None})
        self._chunk = max(1, min(max(self._runs, default=0), _CHUNK // self._count))
        self.buffers = buffers or Buffers(device)
        self._gathered: tuple[Tensor, Tensor] | None = None

    @property
    def buffer_bytes(self) -> int:
        """Return what a gather takes, its own part included."""
        return (
            0 if self._count == 1 else 4 * self._chunk * (self._count + 1) if any(self._runs) else 0
        )

    def all_gather(self, fragments: Iterable[int]) -> None:
        """Write every rank's part of these fragments to this rank's masters, too. Collective."""
        if self._count == 1:
            return
        if self._gathered is None:
            zeros = self.buffers.zeros
            self._gathered = zeros(self._chunk), zeros(self._chunk * self._count)
        for fragment in fragments:
            run = self._runs[fragment]
            for first in range(0, run, self._chunk):
                self._gather(fragment, first, min(self._chunk, run - first), *self._gathered)

    def _gather(self, fragment: int, first: int, numel: int, own: Tensor, everyone: Tensor) -> None:
        """All-gather the same elements of every rank's run, `numel` from `first` on."""
        run, wholes = self._runs[fragment], self._wholes[fragment]
        own, parts = own[:numel], everyone[: numel * self._count].split(numel)
        for place, piece in _overlaps(wholes, self._rank * run + first, numel):
            own[place : place + piece.numel].copy_(piece.view())
        with waiting_for(f"the ranks of this stage (masters of fragment {fragment})", None):
            dist.all_gather(list(parts), own, group=self._group)
        for rank, part in enumerate(parts):
            for place, piece in _overlaps(wholes, rank * run + first, numel):
                if rank != self._rank:
                    piece.overwrite(part[place : place + piece.numel])


class ReplicaSets:
    """The parts of one rank in several sets of masters, each of the ranks of one of `groups`.

    Every name is in one set. Ranks that share several groups name them in the same order.
    """

    def __init__(
        self,
        assignment: Sequence[Sequence[str]],
        wholes: Sequence[Mapping[str, Piece]],
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        self.buffers = Buffers(device)
        self._sets = [
            ReplicaShards(assignment, own, group, device, self.buffers)
            for own, group in zip(wholes, groups, strict=True)
        ]
        self.pieces = {name: piece for one in self._sets for name, piece in one.pieces.items()}

    @property
    def buffer_bytes(self) -> int:
        """Return what gathers of all sets take."""
        return sum(one.buffer_bytes for one in self._sets)

    def all_gather(self, fragments: Iterable[int]) -> None:
        """Write every rank's part of these fragments to this rank's masters, too. Collective."""
        named = list(fragments)
        for one in self._sets:
            one.all_gather(named)


def _overlaps(
    wholes: Iterable[tuple[int, Piece]], first: int, numel: int
) -> Iterator[tuple[int, Piece]]:
    """Yield where in `numel` elements from `first` on which piece of a fragment lies."""
    for at, whole in wholes:
        piece = whole.cut(first - at, first + numel - at)
        if piece is not None:
            yield at + piece.start - first, piece


def _in_a_row(wholes: Mapping[str, Piece]) -> list[tuple[str, int, Piece]]:
    """Return `(name, where its parameter would begin, piece)` of a fragment, one after another."""
    placed: list[tuple[str, int, Piece]] = []
    end = 0
    for name, whole in wholes.items():
        placed.append((name, end - whole.start, whole))
        end += whole.numel
    return placed
