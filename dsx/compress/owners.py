"""What the factors of matrices take on the wire and in memory: bytes by cluster.

Who averages which is said by blocks.py. Of a P that is cut, the owners of its blocks send their
means (int8 codes, or fp32 as factors are) to one cluster, which makes it orthonormal and sends each
the codes of its block, for all the others. factors.py says what the bytes are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dsx.compress.blocks import Block, Matrices, Owners, factor_owners
from dsx.compress.slices import RECEIVED, SENT, Rounds, Sizes, to_all_round, to_owners_round
from dsx.compress.wire.formats import FORMATS

if TYPE_CHECKING:
    from dsx.compress.wire.base import Kernels, Wire
    from dsx.core.types import Slot

CODES, SCALES = "q.", "q_scale."  # before a matrix's name, what it starts its next round from
ADDED_NUMEL = 2**24  # elements of a factor that are decoded at a time, to be added: 64 MiB
NUM_PROBES = 4  # random directions that estimate how much of the mean the factors miss
EXPONENT_BYTES = 1  # per row, up
SCALE_BYTES = 2  # per column, down


def two_sides(slot: Slot) -> tuple[int, int]:
    """Return a parameter as a matrix: the first dimension by all the others."""
    whole = slot.whole or slot.shape
    rows = whole[0]
    return rows, slot.numel // rows


def up_bytes(wire: Wire, rows: int, length: int) -> int:
    """Return the size of a cluster's `rows` directions of `length`, on their way to the owner."""
    return (0 if wire.is_exact else rows * EXPONENT_BYTES) + wire.num_bytes(rows * length)


def rows_added(wire: Wire, rows: int, length: int) -> int:
    """Return how many of `rows` directions of `length` are decoded at a time, to be added.

    As many as lie in a message by themselves: a number that its format may be cut at, or all.
    """
    step = wire.granularity // gcd(wire.granularity, length)
    return min(rows, max(1, ADDED_NUMEL // (step * length)) * step)


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
    space by role, by cluster.
    """

    messages: Sizes
    probes: int
    work: Mapping[str, Sizes]


def factor_bytes(
    matrices: Matrices, wire: Wire, num_clusters: int, first: int, kernels: Kernels = "auto"
) -> FactorBytes:
    """Return what the matrices `(m, n, largest rank)` of a channel take, warm starts apart."""
    by_matrix = factor_owners(matrices, num_clusters, first)
    num_bytes = np.zeros(num_clusters, dtype=np.int64)
    work, probes = dict[str, Sizes](), 0
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
        # each holds its factor, or of the other one what is scaled, or added
        needed = {
            "p": 4 * np.maximum(rows * m, _room(owners.q, wire, rank, num_clusters)),
            "q": 4 * np.maximum(rows * n, _room(owners.p, wire, rows, num_clusters)),
        }
        longest_p, longest_q = (max(b.length for b in blocks) for blocks in (owners.p, owners.q))
        most = max(rows * longest_p, rank * longest_q)
        formats = (wire, of_sums(wire)) if owners.is_cut else (wire,)
        codecs = [item for each in formats for item in each.work(most, kernels).items()]
        for role, size in (*needed.items(), *codecs):
            before = work.setdefault(role, np.zeros_like(num_bytes))
            work[role] = np.maximum(before, size)
    return FactorBytes(num_bytes, probes, work)


def _room(blocks: Sequence[Block], wire: Wire, rows: int, num_clusters: int) -> Sizes:
    """Return the elements in which a factor's blocks are scaled by all, unless it is whole, and
    those of others are added by their owners, by cluster.
    """
    is_cut = len(blocks) > 1
    found = np.full(num_clusters, rows * max(b.length for b in blocks) * is_cut, dtype=np.int64)
    for block in blocks if num_clusters > 1 else ():
        added = rows_added(wire, rows, block.length) * block.length
        found[block.owner] = max(found[block.owner], added)
    return found


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
