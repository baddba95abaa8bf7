"""Which clusters average the factors of which matrices, and how many bytes that takes.

A round of an exchange lasts as long as the cluster with most to send or to receive needs, so each
factor is shared out evenly, by itself: P and Q go one after another. Whole ones, as long as that is
even enough; where there are too many clusters for that, all factors are laid end to end and cut
into as many parts of one size, in columns of `[r, k]`. Of a P that is cut, the owners of its blocks
send their means (int8 codes, or fp32 as factors are) to one of them, which makes it orthonormal and
sends each the codes of its block, for all the others. factors.py says what the bytes are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapreplace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dsx.compress.slices import RECEIVED, SENT, Rounds, Sizes, to_all_round, to_owners_round
from dsx.compress.wire.formats import FORMATS

if TYPE_CHECKING:
    from dsx.compress.wire.base import Kernels, Wire
    from dsx.core.types import Slot

CODES, SCALES = "q.", "q_scale."  # before a matrix's name, what it starts its next round from
NUM_PROBES = 4  # random directions that estimate how much of the mean the factors miss
EXPONENT_BYTES = 1  # per row, up
SCALE_BYTES = 2  # per column, down
_CUT_FROM = 8  # clusters: with fewer, what a cut P adds is more than what it evens out
_EVEN = 1.1  # the most that a cluster has, by the mean of all, for factors to be left whole
_COLUMNS = 16  # blocks begin at multiples


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


Matrices = tuple[tuple[int, int, int], ...]  # (m, n, rank) of each


def factor_owners(matrices: Matrices, num_clusters: int, first: int) -> tuple[Owners, ...]:
    """Return who averages P `[r, m]` and Q `[r, n]` of each matrix `(m, n, largest rank)`.

    Clusters are counted from `first` on for P, and for Q from the next one, so that the one with
    most of P is not the one with most of Q. Owners stay when a controller changes the rank.
    """
    p, q = (
        _blocks([(sides[factor], sides[2]) for sides in matrices], num_clusters, first + factor)
        for factor in (0, 1)
    )
    return tuple(
        Owners(of_p, of_q, max(of_p, key=lambda block: block.length).owner)
        for of_p, of_q in zip(p, q, strict=True)
    )


def two_sides(slot: Slot) -> tuple[int, int]:
    """Return a parameter as a matrix: the first dimension by all the others."""
    whole = slot.whole or slot.shape
    rows = whole[0]
    return rows, slot.numel // rows


def up_bytes(wire: Wire, rows: int, length: int) -> int:
    """Return the size of a cluster's `rows` directions of `length`, on their way to the owner."""
    return (0 if wire.is_exact else rows * EXPONENT_BYTES) + wire.num_bytes(rows * length)


def down_bytes(is_exact: bool, rows: int, length: int) -> int:
    """Return the size of a mean factor of `rows` directions of `length`, from its owner to all."""
    return 4 * rows * length if is_exact else rows * length + length * SCALE_BYTES


def warm_bytes(is_exact: bool, rank: int, length: int) -> int:
    """Return what the directions that a matrix starts from take: codes and scales, or values."""
    return 4 * rank * length if is_exact else rank * length + 4 * length


def of_sums(wire: Wire) -> Wire:
    """Return the format in which block means of a P that is cut go to who makes it orthonormal."""
    return wire if wire.is_exact else FORMATS["int8"]()


def factor_rounds(
    matrices: Matrices, largest: tuple[int, ...], wire: Wire, num_clusters: int, first: int
) -> Rounds:
    """Return what factors of matrices `(m, n, rank)` take in one power iteration.

    P to its owners, their means to all, then Q likewise, and between them what a P that is cut
    needs; `largest` are the ranks that owners go by, `first` as for `factor_owners`, whom it turns
    around and with them what each of them sends.
    """
    return np.roll(_rounds_from_the_first(matrices, largest, wire, num_clusters), first, axis=1)


class FactorSizes(NamedTuple):
    """What a cluster's messages of one matrix take, for ranks up to one, in bytes.

    `sent` and `received` are of the larger factor, `received` of what this cluster averages.
    `told` is the means of its blocks of a P that is cut, or if it is `qr`, of all of them.
    """

    sent: int
    received: int
    mean_p: int
    mean_q: int
    told: int

    def num_bytes(self, num_clusters: int) -> int:
        """Return what they take: what is received comes from every other cluster."""
        received = (num_clusters - 1) * self.received
        return self.sent + received + self.mean_p + self.mean_q + self.told


def factor_sizes(max_rank: int, wire: Wire, owners: Owners, position: int) -> FactorSizes:
    """Return the messages of a matrix at one cluster."""
    rows = max_rank + NUM_PROBES, max_rank
    sent, received, means = ([0, 0] for _ in range(3))
    told, summed = 0, of_sums(wire)
    for factor, blocks in enumerate((owners.p, owners.q)):
        for block in blocks:
            size = up_bytes(wire, rows[factor], block.length)
            sent[factor] += size
            received[factor] += size * (block.owner == position)
            means[factor] += down_bytes(wire.is_exact, max_rank, block.length)
    if owners.is_cut:
        told = sum(
            up_bytes(summed, rows[0], block.length)
            for block in owners.p
            if position in (block.owner, owners.qr)
        )
    return FactorSizes(max(sent), max(received), means[0], means[1], told)


class FactorBytes(NamedTuple):
    """What the matrices of a channel take: messages, by cluster, what probes have seen, and work
    space by role.
    """

    messages: Sizes
    probes: int
    work: Mapping[str, int]


def factor_bytes(
    matrices: Matrices, wire: Wire, num_clusters: int, first: int, kernels: Kernels = "auto"
) -> FactorBytes:
    """Return what the matrices `(m, n, largest rank)` of a channel take, warm starts apart."""
    by_matrix = factor_owners(matrices, num_clusters, first)
    num_bytes = np.zeros(num_clusters, dtype=np.int64)
    work, probes = dict[str, int](), 0
    alike = Counter(zip(matrices, by_matrix, strict=True))
    for ((m, n, rank), owners), count in alike.items():
        rows = rank + NUM_PROBES
        received, told = np.zeros((2, num_clusters), dtype=np.int64), np.zeros_like(num_bytes)
        for factor, (blocks, height) in enumerate(((owners.p, rows), (owners.q, rank))):
            for block in blocks:
                received[factor, block.owner] += up_bytes(wire, height, block.length)
        for block in owners.p if owners.is_cut else ():
            size = up_bytes(of_sums(wire), rows, block.length)
            told[block.owner] += size * (block.owner != owners.qr)
            told[owners.qr] += size
        sizes = factor_sizes(rank, wire, owners, owners.qr)
        held = sizes.sent + sizes.mean_p + sizes.mean_q
        probes += count * 4 * NUM_PROBES * m
        num_bytes += count * (held + told + (num_clusters - 1) * received.max(axis=0))
        scaled_p, scaled_q = (max(b.length for b in blocks) for blocks in (owners.p, owners.q))
        most = max(rows * scaled_p, rank * scaled_q)
        # each holds its factor, or of the other one a block that is scaled
        needed = {
            "p": 4 * max(rows * m, rank * scaled_q), "q": 4 * rows * max(n, scaled_p),
        }  # fmt: skip
        formats = (wire, of_sums(wire)) if owners.is_cut else (wire,)
        codecs = [item for each in formats for item in each.work(most, kernels).items()]
        for role, size in (*needed.items(), *codecs):
            work[role] = max(work.get(role, 0), size)
    return FactorBytes(num_bytes, probes, work)


@lru_cache(maxsize=1024)
def _rounds_from_the_first(
    matrices: Matrices, largest: tuple[int, ...], wire: Wire, num_clusters: int
) -> Rounds:
    sides = [(m, n, most) for (m, n, _), most in zip(matrices, largest, strict=True)]
    owners = factor_owners(tuple(sides), num_clusters, 0)
    ranks = [rank for *_, rank in matrices]
    p, q = (
        _to_owners_and_back(factors, ranks, probes, wire, num_clusters)
        for factors, probes in (([by.p for by in owners], NUM_PROBES), ([by.q for by in owners], 0))
    )
    if any(by.is_cut for by in owners):
        p = _through_one(p, owners, ranks, wire)
    return np.concatenate([p, q])


def _to_owners_and_back(
    factors: Sequence[tuple[Block, ...]],
    ranks: Sequence[int],
    probes: int,
    wire: Wire,
    num_clusters: int,
) -> Rounds:
    """Return the codes of every block to its owner, and the owners' means to all."""
    up, down = np.zeros((2, num_clusters), dtype=np.int64)  # by owner
    for blocks, rank in zip(factors, ranks, strict=True):
        for block in blocks:
            up[block.owner] += up_bytes(wire, rank + probes, block.length)
            down[block.owner] += down_bytes(wire.is_exact, rank, block.length)
    return np.concatenate([to_owners_round(up), to_all_round(down)])


def _through_one(
    rounds: Rounds, owners: Sequence[Owners], ranks: Sequence[int], wire: Wire
) -> Rounds:
    """Return what P takes with the means of its blocks going to `qr` and back between."""
    up, down = rounds
    there, back = (np.zeros_like(up) for _ in range(2))
    for by, rank in zip(owners, ranks, strict=True):
        for block in by.p:
            if block.owner != by.qr:
                told = up_bytes(of_sums(wire), rank + NUM_PROBES, block.length)
                there[block.owner, SENT] += told
                there[by.qr, RECEIVED] += told
                codes = down_bytes(wire.is_exact, rank, block.length)
                back[by.qr, SENT] += codes
                back[block.owner, RECEIVED] += codes
                down[block.owner, SENT] -= codes  # who has made them needs them no more
                down[by.qr, RECEIVED] -= codes
    return np.stack([up, there, back, down])


def _blocks(
    sizes: Sequence[tuple[int, int]], num_clusters: int, first: int
) -> list[tuple[Block, ...]]:
    """Return the blocks of factors of `(length, rank)`: whole ones, or equal parts of them all."""
    whole = [
        (Block(0, length, owner),)
        for (length, _), owner in zip(sizes, _share_out(sizes, num_clusters), strict=True)
    ]
    found, even = whole, sum(k * rank for k, rank in sizes) / num_clusters
    if num_clusters >= _CUT_FROM and _most(whole, sizes, num_clusters) > _EVEN * even:
        cut = _cut(sizes, num_clusters)
        found = min(whole, cut, key=lambda blocks: _most(blocks, sizes, num_clusters))
    return [
        tuple(block._replace(owner=(block.owner + first) % num_clusters) for block in blocks)
        for blocks in found
    ]


def _most(
    factors: Sequence[tuple[Block, ...]], sizes: Sequence[tuple[int, int]], num_clusters: int
) -> int:
    """Return how many elements the cluster with most of them averages."""
    load = [0] * num_clusters
    for blocks, (_, rank) in zip(factors, sizes, strict=True):
        for block in blocks:
            load[block.owner] += rank * block.length
    return max(load)


def _cut(sizes: Sequence[tuple[int, int]], num_clusters: int) -> list[tuple[Block, ...]]:
    """Return the parts of factors that lie end to end: one for each cluster, in turn."""
    total = sum(length * rank for length, rank in sizes)
    found: list[tuple[Block, ...]] = []
    before = 0
    for length, rank in sizes:
        blocks: list[Block] = []
        start, end = 0, before + length * rank
        for owner in range(before * num_clusters // total, num_clusters):
            reaches = total * (owner + 1) // num_clusters - before
            columns = round(reaches / (rank * _COLUMNS)) * _COLUMNS
            stop = length if before + reaches >= end else min(columns, length)
            if stop > start:
                blocks.append(Block(start, stop, owner))
                start = stop
            if stop == length:
                break
        found.append(tuple(blocks))
        before = end
    return found


def _share_out(sizes: Sequence[tuple[int, int]], num_clusters: int) -> list[int]:
    """Return an owner for each of `(length, rank)`: the largest first, to who has least so far."""
    by_load, owners = [(0, owner) for owner in range(num_clusters)], [0] * len(sizes)
    elements = [length * rank for length, rank in sizes]
    for index in sorted(range(len(sizes)), key=lambda i: -elements[i]):
        load, owners[index] = by_load[0]
        heapreplace(by_load, (load + elements[index], owners[index]))
    return owners
