"""Which clusters average the factors of which matrices: whole ones, or blocks of their columns.

A round of an exchange lasts as long as the cluster with most to send or to receive needs, so each
factor is shared out evenly, by itself: P and Q go one after another. Whole ones, as long as that is
even enough; where there are too many clusters for that, all factors are laid end to end and cut
into as many parts, in columns of `[r, k]`. Parts are of one size, but where the cluster that makes
a cut P orthonormal sends so much more than the others, as it hands that back to the owners of its
blocks: its parts are then smaller by as much.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapreplace
from itertools import accumulate
from typing import NamedTuple

_CUT_FROM = 8  # clusters: with fewer, what a cut P adds is more than what it evens out
_EVEN = 1.1  # the most that a cluster has, by the mean of all, for factors to be left as they are
_COLUMNS = 16  # blocks begin at multiples

Matrices = tuple[tuple[int, int, int], ...]  # (m, n, rank) of each
_Sizes = Sequence[tuple[int, int]]  # (length, rank) of factors


class Block(NamedTuple):
    """Columns start..stop of a factor `[r, k]`, and who averages them, by position."""

    start: int
    stop: int
    owner: int

    @property
    def length(self) -> int:
        """How many columns it has."""
        return self.stop - self.start


class Owners(NamedTuple):
    """The blocks of the two factors of a matrix, in order; `qr` makes P orthonormal."""

    p: tuple[Block, ...]
    q: tuple[Block, ...]
    qr: int

    @property
    def is_cut(self) -> bool:
        """Whether P has several blocks, whose means go to `qr` first."""
        return len(self.p) > 1


_Blocks = list[tuple[Block, ...]]  # of each factor


def factor_owners(matrices: Matrices, num_clusters: int, first: int) -> tuple[Owners, ...]:
    """Return who averages P `[r, m]` and Q `[r, n]` of each matrix `(m, n, largest rank)`.

    Clusters are counted from `first` on for the longer ones of P and Q, and for the others from the
    next one, so that the one with most of P is not the one with most of Q. Owners stay when a
    controller changes the rank.
    """
    found = _from_the_first(matrices, num_clusters)
    both = [by.p for by in found], [by.q for by in found]
    p, q = (_turned(factors, first, num_clusters) for factors in both)
    qr = [(by.qr + first) % num_clusters for by in found]
    return tuple(Owners(*each) for each in zip(p, q, qr, strict=True))


@lru_cache(maxsize=1024)
def _from_the_first(matrices: Matrices, num_clusters: int) -> tuple[Owners, ...]:
    p, q = ([(sides[factor], sides[2]) for sides in matrices] for factor in (0, 1))
    turns = (0, 1) if _elements(p) >= _elements(q) else (1, 0)
    both = [
        _turned(_shared_out(sizes, num_clusters), turn, num_clusters)
        for sizes, turn in zip((p, q), turns, strict=True)
    ]
    qr = [_longest(of_p) for of_p in both[0]]
    if any(len(of_p) > 1 for of_p in both[0]):
        both[0], both[1], qr = _evened((p, q), (both[0], both[1]), turns, qr, num_clusters)
    return tuple(Owners(*each) for each in zip(*both, qr, strict=True))


def _evened(
    sizes: tuple[_Sizes, _Sizes],
    both: tuple[_Blocks, _Blocks],
    turns: tuple[int, int],
    qr: list[int],
    num_clusters: int,
) -> tuple[_Blocks, _Blocks, list[int]]:
    """Return the blocks of P and Q, and who makes each P orthonormal, with what those hand back
    evened out, if some cluster sends so much more than the others.
    """
    handed = _handed_back(sizes[0], both[0], qr, num_clusters)
    own = [_loads(*each, num_clusters) for each in zip(sizes, both, strict=True)]
    sent = [sum(each) for each in zip(*own, handed, strict=True)]
    if max(sent) * num_clusters <= _EVEN * sum(sent):
        return *both, qr
    makers = _makers(sizes[0], both[0], num_clusters)
    taken = _handed_back(sizes[0], both[0], makers, num_clusters)
    is_cut = [any(len(blocks) > 1 for blocks in of) for of in both]
    if not is_cut[1]:
        taken = [a + b for a, b in zip(taken, own[1], strict=True)]
    total = sum(_elements(each) for each, cut in zip(sizes, is_cut, strict=True) if cut)
    rooms = _rooms(total, taken)
    p, q = (
        # counted as owners are, from the one that its turn begins with
        _turned(_cut(each, rooms[turn:] + rooms[:turn]), turn, num_clusters) if cut else blocks
        for each, blocks, turn, cut in zip(sizes, both, turns, is_cut, strict=True)
    )
    pairs = zip(p, makers, strict=True)
    return p, q, [by if by in (b.owner for b in of_p) else _longest(of_p) for of_p, by in pairs]


def _longest(blocks: tuple[Block, ...]) -> int:
    """Return who averages the longest block."""
    return max(blocks, key=lambda block: block.length).owner


def _elements(sizes: _Sizes) -> int:
    return sum(length * rank for length, rank in sizes)


def _turned(factors: Sequence[tuple[Block, ...]], first: int, num_clusters: int) -> _Blocks:
    return [
        tuple(block._replace(owner=(block.owner + first) % num_clusters) for block in blocks)
        for blocks in factors
    ]


def _handed_back(sizes: _Sizes, p: _Blocks, qr: Sequence[int], num_clusters: int) -> list[int]:
    """Return the elements that a cluster would average to send as much as it hands back."""
    sent = [0] * num_clusters
    for (_, rank), blocks, maker in zip(sizes, p, qr, strict=True):
        sent[maker] += sum(rank * block.length for block in blocks if block.owner != maker)
    return [elements // max(num_clusters - 1, 1) for elements in sent]


def _makers(sizes: _Sizes, p: _Blocks, num_clusters: int) -> list[int]:
    """Return who makes each P orthonormal, of those who average blocks of it: the largest first, to
    who hands back least so far.
    """
    load, makers = [0] * num_clusters, [0] * len(sizes)
    elements = [length * rank for length, rank in sizes]
    for index in sorted(range(len(sizes)), key=lambda i: -elements[i]):
        makers[index] = min(p[index], key=lambda b: (load[b.owner], -b.length)).owner
        load[makers[index]] += elements[index] * (len(p[index]) > 1)
    return makers


def _rooms(total: int, taken: Sequence[int]) -> list[int]:
    """Return in which proportion clusters average `total` elements so that with what is `taken` all
    have as much, or nothing.
    """
    least = sorted(taken)
    sums = [*accumulate(least)]
    count = max(k for k in range(1, len(taken) + 1) if total + sums[k - 1] >= k * least[k - 1])
    return [max(total + sums[count - 1] - count * size, 0) for size in taken]


def _shared_out(sizes: _Sizes, num_clusters: int) -> _Blocks:
    """Return the blocks of factors: whole ones, or equal parts of them all."""
    owners = _share_out(sizes, num_clusters)
    whole = [(Block(0, length, by),) for (length, _), by in zip(sizes, owners, strict=True)]
    if num_clusters < _CUT_FROM:
        return whole
    most = max(_loads(sizes, whole, num_clusters))
    if most * num_clusters <= _EVEN * _elements(sizes):
        return whole
    cut = _cut(sizes, [1] * num_clusters)
    return whole if most <= max(_loads(sizes, cut, num_clusters)) else cut


def _loads(sizes: _Sizes, factors: Sequence[tuple[Block, ...]], num_clusters: int) -> list[int]:
    """Return how many elements each cluster averages."""
    load = [0] * num_clusters
    for blocks, (_, rank) in zip(factors, sizes, strict=True):
        for block in blocks:
            load[block.owner] += rank * block.length
    return load


def _cut(sizes: _Sizes, rooms: Sequence[int]) -> _Blocks:
    """Return the parts of factors that lie end to end: one for each cluster, in turn, as large as
    its room, by those of all.
    """
    total, ends = _elements(sizes), [*accumulate(rooms)]
    reaches = [total * end // ends[-1] for end in ends]
    found: _Blocks = []
    before = 0
    for length, rank in sizes:
        blocks: list[Block] = []
        start, end = 0, before + length * rank
        for owner in range(bisect_right(reaches, before), len(rooms)):
            columns = round((reaches[owner] - before) / (rank * _COLUMNS)) * _COLUMNS
            stop = length if reaches[owner] >= end else min(columns, length)
            if stop > start:
                blocks.append(Block(start, stop, owner))
                start = stop
            if stop == length:
                break
        found.append(tuple(blocks))
        before = end
    return found


def _share_out(sizes: _Sizes, num_clusters: int) -> list[int]:
    """Return an owner for each of `(length, rank)`: the largest first, to who has least so far."""
    by_load, owners = [(0, owner) for owner in range(num_clusters)], [0] * len(sizes)
    elements = [length * rank for length, rank in sizes]
    for index in sorted(range(len(sizes)), key=lambda i: -elements[i]):
        load, owners[index] = by_load[0]
        heapreplace(by_load, (load + elements[index], owners[index]))
    return owners
