"""Which rank of a cluster gets each matrix that its codec wants whole.

A rank keeps, for rounds under way, what it has of the fragments as they travel, and sends of each
matrix a factor's bytes, which go with the sum of its sides where elements go with their product. So
matrices are dealt by both: what counts is the larger of a rank's share of the elements and of the
bytes, each by the mean of all ranks. The largest matrices of all fragments first, each to the rank
that has least with it, and of ranks that have as little to the one with least of that fragment;
then the fullest rank gives away, or exchanges, as long as that evens it out.

A matrix goes to a rank that holds some of it, and one that lies whole on a rank stays there. Only
where some rank has so more than a tenth above the mean, and a tenth less is to be had, does any
matrix go to any rank. Every rank comes to the same: all is integers, and divisions of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsx.core.types import Fragment, Slot

if TYPE_CHECKING:
    from dsx.method.method import Method

EVEN = 1.1  # the most that a rank has, by the mean of all, for matrices that lie whole to stay
_WORTH = 0.9  # of what the fullest rank has: what it has to come to for those to move
_ALIKE = 256  # ranks are as full where their shares, times this, are so when rounded
_ROUNDS = 4  # of the ranks' number: how often the fullest one gives away or exchanges, at most
_TOLD = 1.005  # the most that a rank has where nothing is exchanged any more

Loads = NDArray[np.int64]  # by rank: elements, and bytes sent


class WholeMatrices(NamedTuple):
    """What a codec says of parameters: which it takes whole, and about what each then sends."""

    takes: Callable[[Slot], bool]
    usual_bytes: Callable[[Slot], int]


class Matrix(NamedTuple):
    """One that is to be dealt: of a fragment, with the ranks that hold some of it, and how much.

    `home` is the rank where it lies whole, if it does.
    """

    fragment: int
    numel: int
    sent: int
    held: Mapping[int, int]
    home: int | None = None


def wanted_whole(method: Method) -> WholeMatrices:
    """Return what a method's codec says."""
    compression, rank = method.compression, method.control.largest_rank
    return WholeMatrices(compression.takes, partial(compression.usual_bytes, max_rank=rank))


class Moved(NamedTuple):
    """A matrix that goes to a rank: its slot, of all of it, with no place in a fragment yet."""

    owner: int
    slot: Slot


def share_out(
    layouts: Sequence[Sequence[Fragment]], wanted: WholeMatrices
) -> list[dict[str, Moved]]:
    """Return by fragment, and by name, the matrices that move; `layouts` are all ranks' fragments,
    as they lie.
    """
    slots, matrices, loads = _found(layouts, wanted)
    moved: list[dict[str, Moved]] = [{} for _ in layouts[0]]
    for slot, matrix, owner in zip(slots, matrices, deal(matrices, loads), strict=True):
        if owner != matrix.home:
            moved[matrix.fragment][slot.name] = Moved(owner, slot)
    return moved


def deal(matrices: Sequence[Matrix], loads: Loads) -> list[int]:
    """Return the rank of each matrix; `loads` `[ranks, 2]` are what ranks have beside them."""
    if not matrices:
        return []
    table = _Table(matrices, loads)
    table.deal_largest_first()
    table.even_out(table.may_hold)
    before, owners = table.most, list(table.owners)
    if before > EVEN:
        table.even_out(np.ones_like(table.may_hold), table.most_elements)
        if table.most > max(EVEN, _WORTH * before):
            return owners
    return table.owners


def _found(
    layouts: Sequence[Sequence[Fragment]], wanted: WholeMatrices
) -> tuple[list[Slot], list[Matrix], Loads]:
    """Return the matrices that may move, with their slots, and what ranks have of all else."""
    loads = np.zeros((len(layouts), 2), dtype=np.int64)
    taken: dict[tuple[int, str], tuple[Slot, dict[int, int]]] = {}
    known: dict[tuple[object, ...], tuple[bool, int]] = {}  # slots of a model are much alike
    for rank, fragments in enumerate(layouts):
        for number, fragment in enumerate(fragments):
            for slot in fragment.layout:
                if not slot.numel:
                    continue
                key = slot.name, slot.shape, slot.whole
                if key not in known:
                    known[key] = wanted.takes(whole(slot)), wanted.usual_bytes(slot)
                if known[key][0]:
                    _, held = taken.setdefault((number, slot.name), (slot, {}))
                    held[rank] = slot.numel
                else:
                    loads[rank] += slot.numel, known[key][1]
    slots, matrices = list[Slot](), list[Matrix]()
    for (number, _), (piece, held) in taken.items():
        slot = whole(piece)
        home = next(iter(held)) if piece.is_whole else None
        slots.append(slot)
        matrices.append(Matrix(number, slot.numel, wanted.usual_bytes(slot), held, home))
    return slots, matrices, loads


def whole(slot: Slot) -> Slot:
    """Return the slot of all of a parameter, of one of its pieces."""
    return replace(slot, shape=slot.whole or slot.shape, offset=0, start=0)


class _Table:
    """Who has what so far."""

    def __init__(self, matrices: Sequence[Matrix], loads: Loads) -> None:
        self._matrices = matrices
        self._loads = loads.copy()
        self._ranks = np.arange(len(loads))
        self._sizes = np.array([(m.numel, m.sent) for m in matrices], dtype=np.int64)
        total = loads.sum(axis=0) + self._sizes.sum(axis=0)
        self._mean = np.maximum(total, 1) / len(loads)
        fragments = 1 + max(m.fragment for m in matrices)
        self._of_fragment = np.zeros((fragments, len(loads)), dtype=np.int64)
        self.may_hold = np.zeros((len(matrices), len(loads)), dtype=np.bool_)
        for index, matrix in enumerate(matrices):
            self.may_hold[index, list(matrix.held)] = True
        self._owners = np.full(len(matrices), -1)
        for index, matrix in enumerate(matrices):
            if matrix.home is not None:
                self._give(index, matrix.home)

    @property
    def owners(self) -> list[int]:
        """The rank of each matrix."""
        return self._owners.tolist()

    @property
    def most(self) -> float:
        """What the fullest rank has, by the mean of all."""
        return float(self._share(self._loads).max())

    @property
    def most_elements(self) -> float:
        """The same of elements alone."""
        return float((self._loads[:, 0] / self._mean[0]).max())

    def deal_largest_first(self) -> None:
        """Give each matrix that is split to one of the ranks that hold some of it."""
        shares = self._share(self._sizes).tolist()
        split = [i for i, matrix in enumerate(self._matrices) if matrix.home is None]
        for index in sorted(split, key=lambda i: (-shares[i], i)):
            matrix = self._matrices[index]
            ranks = np.array(sorted(matrix.held))
            kept = np.array([matrix.held[rank] for rank in ranks.tolist()])
            fullness = np.rint(_ALIKE * self._share(self._loads[ranks] + self._sizes[index]))
            of_fragment = self._of_fragment[matrix.fragment, ranks]
            best = np.lexsort((ranks, -kept, of_fragment, fullness))[0]
            self._give(index, int(ranks[best]))

    def even_out(self, allowed: NDArray[np.bool_], most_elements: float = np.inf) -> None:
        """Let the fullest rank give away or exchange matrices, to ranks that are `allowed`.

        `most_elements`: no rank comes to have more of them, by their mean.
        """
        for _ in range(_ROUNDS * len(self._ranks)):
            shares = self._share(self._loads)
            fullest = int(shares.argmax())
            found = self._best_change(fullest, allowed, max(most_elements, EVEN))
            if shares[fullest] <= _TOLD or found is None:
                return
            given, rank, taken = found
            self._give(given, rank)
            if taken is not None:
                self._give(taken, fullest)

    def _best_change(
        self, rank: int, allowed: NDArray[np.bool_], most_elements: float
    ) -> tuple[int, int, int | None] | None:
        """Return what a rank gives to which other one, and what it takes for that, if it helps."""
        best, found = float(self._share(self._loads[rank : rank + 1])[0]), None
        for own in np.flatnonzero(self._owners == rank).tolist():
            less = self._loads[rank] - self._sizes[own]
            there = self._loads + self._sizes[own]
            after = np.maximum(self._share(there), self._share(less[None]))
            is_open = allowed[own] & (self._ranks != rank)
            is_open &= there[:, 0] <= most_elements * self._mean[0]
            after[~is_open] = np.inf
            if after.min() < best:
                best, found = float(after.min()), (own, int(after.argmin()), None)
            here = less + self._sizes  # with each of the others' in its place
            there = self._loads[self._owners] + self._sizes[own] - self._sizes
            after = np.maximum(self._share(there), self._share(here))
            is_open = allowed[own, self._owners] & allowed[:, rank] & (self._owners != rank)
            is_open &= np.maximum(here, there)[:, 0] <= most_elements * self._mean[0]
            after[~is_open] = np.inf
            if after.min() < best:
                other = int(after.argmin())
                best, found = float(after.min()), (own, int(self._owners[other]), other)
        return found

    def _give(self, index: int, rank: int) -> None:
        """Give a matrix to a rank, from the one that has had it."""
        matrix, before = self._matrices[index], int(self._owners[index])
        if before >= 0:
            self._loads[before] -= self._sizes[index]
            self._of_fragment[matrix.fragment, before] -= matrix.numel
        self._loads[rank] += self._sizes[index]
        self._of_fragment[matrix.fragment, rank] += matrix.numel
        self._owners[index] = rank

    def _share(self, loads: Loads) -> NDArray[np.float64]:
        """Return the larger share of each, of elements or of bytes, by their means."""
        return (loads / self._mean).max(axis=1)
