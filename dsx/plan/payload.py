"""The payload bytes of a transfer, in closed form: what the channels of dsx.compress count.

Nothing is allocated, so a fragment may have any size. The tests compare with runs of every preset
and codec, to the byte. Per transfer and peer there is the announcement with the guard's header, 48
bytes; then the codec's messages; then the notes. Bytes are per cluster, because slices of a mean
and the owners of factors differ from cluster to cluster. A round of low rank is *cold*, with a
second power iteration, where it is the first in factors, or the first after a change of rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from math import lcm
from typing import Literal, NamedTuple

from dsx.compress.owners import factor_owners
from dsx.core.types import Fragment, Slot
from dsx.plan.settings import Coding, Notes

HEADERS_BYTES = 48  # per transfer and peer: comm.reduce.HEADER_BYTES
GATHERED_UP_TO = 3  # clusters
NUM_PROBES = 4
_CASTS = {"fp32": 4, "bf16": 2, "fp16": 2}
_PARTS = {"int8": 1, "fp8": 1, "int4": 2, "fp4_e2m1": 2, "fp4_e3m0": 2, "ternary": 5}  # per byte
_OWN_GROUP = {"int8": 256, "fp8": 256}
RoundKind = Literal["warm", "cold", "dense"]  # of low rank; others have but one kind


class Format(NamedTuple):
    """A wire format by its name; casts have no groups."""

    name: str
    group_size: int

    @property
    def granularity(self) -> int:
        """Elements that stay together."""
        if self.name in _CASTS:
            return 1
        return self.group_size * (self.parts if self.name == "ternary" else 1)

    @property
    def parts(self) -> int:
        """Codes in a byte."""
        return _PARTS[self.name]

    def num_bytes(self, numel: int) -> int:
        """Return the exact size of a message."""
        if self.name in _CASTS:
            return _CASTS[self.name] * numel
        return -(-numel // self.parts) + 2 * -(-numel // self.group_size)


def format_of(name: str, group_size: int | None = None) -> Format:
    """Return a format with the groups given, or those of its own."""
    return Format(name, _OWN_GROUP.get(name, 64) if group_size is None else group_size)


class Parts(NamedTuple):
    """A fragment as a codec sees it: elements in coded runs, small ones, matrices in factors."""

    id: int
    numel: int
    num_tensors: int
    runs: tuple[int, ...]  # coded in every round
    factored_runs: tuple[int, ...]  # of the matrices, coded in dense rounds only
    matrices: tuple[tuple[int, int], ...]
    small: int


def transfer_bytes(
    parts: Parts, coding: Coding, notes: Notes, num_clusters: int, round_kind: RoundKind = "warm"
) -> list[int]:
    """Return what each cluster sends for one transfer of a fragment (of one rank's shard)."""
    if num_clusters == 1:
        return [0]
    numel = (
        notes.per_tensor * parts.num_tensors
        + notes.per_element * parts.numel
        + notes.by_cluster * num_clusters
        + notes.of_owner
    )
    headers = HEADERS_BYTES * (num_clusters - 1)
    sent = _channel_bytes(parts, coding, num_clusters, round_kind)
    noted = exact_bytes(numel, num_clusters)
    return [headers + a + b for a, b in zip(sent, noted, strict=True)]


def _channel_bytes(
    parts: Parts, coding: Coding, num_clusters: int, round_kind: RoundKind
) -> list[int]:
    if coding.type == "dense":
        return list(exact_bytes(parts.numel, num_clusters))
    others = num_clusters - 1
    small = others * format_of(coding.small_wire).num_bytes(parts.small)
    if coding.type == "top_k":
        messages = sum(_sparse_bytes(run, coding.k, coding.chunk) for run in parts.runs)
        return [small + others * messages] * num_clusters
    wire, mean = format_of(coding.wire, coding.group_size), format_of(coding.mean_wire)
    is_dense = round_kind == "dense"
    runs = parts.runs + (parts.factored_runs if is_dense else ())
    total = [small] * num_clusters
    for run in runs:
        for m, sent in enumerate(coded_bytes(run, wire, mean, num_clusters)):
            total[m] += sent
    if not is_dense and parts.matrices:
        swaps = factor_swaps(parts.matrices, coding, num_clusters)
        for m in range(num_clusters):
            sent = sum(swap[(m - parts.id) % num_clusters].sent for swap in swaps)
            total[m] += sent * (2 if round_kind == "cold" else 1)
    return total


def line_bytes(
    shares: Sequence[tuple[Parts, int]], coding: Coding, notes: Notes, num_clusters: int
) -> int:
    """Return for how many bytes a transfer holds the line, of ranks with each part so many times.

    Swaps of factors go one after another, and each ends with the cluster that sends or receives
    most in it; of all else with the one that sends most.
    """
    sent = [0] * num_clusters
    swaps = [[(0, 0)] * num_clusters] * 4
    for parts, count in shares:
        rest = transfer_bytes(parts._replace(matrices=()), coding, notes, num_clusters)
        sent = [a + count * b for a, b in zip(sent, rest, strict=True)]
        if parts.matrices and num_clusters > 1:
            own = factor_swaps(parts.matrices, coding, num_clusters)
            swaps = [
                [
                    (
                        out + count * swap[m % num_clusters].sent,
                        in_ + count * swap[m % num_clusters].received,
                    )
                    for m, (out, in_) in enumerate(total, -parts.id)
                ]
                for total, swap in zip(swaps, own, strict=True)
            ]
    return max(sent) + sum(max(max(both) for both in swap) for swap in swaps)


@lru_cache(maxsize=4096)
def exact_bytes(numel: int, num_clusters: int) -> tuple[int, ...]:
    """Return what each cluster sends for a mean in fp32: slices to owners, the own mean to all."""
    own = [b - a for a, b in _slices(numel, num_clusters, 1)]
    return tuple(4 * (numel - n + n * (num_clusters - 1)) for n in own)


@lru_cache(maxsize=65536)
def coded_bytes(numel: int, wire: Format, mean: Format, num_clusters: int) -> tuple[int, ...]:
    """Return what each cluster sends for a mean in codes."""
    others = num_clusters - 1
    if num_clusters <= GATHERED_UP_TO:
        return (others * wire.num_bytes(numel),) * num_clusters
    granularity = lcm(wire.granularity, mean.granularity)
    lengths = [b - a for a, b in _slices(numel, num_clusters, granularity)]
    codes = [wire.num_bytes(n) for n in lengths]
    total = sum(codes)
    return tuple(
        total - code + others * mean.num_bytes(n) for code, n in zip(codes, lengths, strict=True)
    )


class Passed(NamedTuple):
    """Bytes of one cluster in one swap."""

    sent: int
    received: int


@lru_cache(maxsize=4096)
def factor_swaps(
    matrices: tuple[tuple[int, int], ...], coding: Coding, num_clusters: int
) -> tuple[tuple[Passed, ...], ...]:
    """Return what every cluster sends and receives of factors, swap by swap, in fragment 0.

    P to its owners, their means to all, then Q likewise. In fragment f, cluster m has what cluster
    m - f has in fragment 0.
    """
    owners = factor_owners(matrices, num_clusters, 0)
    others, swaps = num_clusters - 1, list[tuple[Passed, ...]]()
    for factor, probes in ((0, NUM_PROBES), (1, 0)):
        ups, downs = [0] * num_clusters, [0] * num_clusters  # by owner
        for sides, by in zip(matrices, owners, strict=True):
            rank = min(coding.rank or 0, coding.max_rank, largest_rank(*sides, coding))
            ups[by[factor]] += _up_bytes(rank + probes, sides[factor], coding)
            downs[by[factor]] += _down_bytes(rank, sides[factor], coding)
        swaps.append(tuple(Passed(sum(ups) - up, others * up) for up in ups))
        swaps.append(tuple(Passed(others * down, sum(downs) - down) for down in downs))
    return tuple(swaps)


def _up_bytes(rows: int, length: int, coding: Coding) -> int:
    exponents = 0 if coding.factor_wire == "fp32" else rows
    return exponents + format_of(coding.factor_wire).num_bytes(rows * length)


def _down_bytes(rows: int, length: int, coding: Coding) -> int:
    return 4 * rows * length if coding.factor_wire == "fp32" else rows * length + 2 * length


def _sparse_bytes(numel: int, k: int, chunk: int) -> int:
    full, rest = divmod(numel, chunk)
    kept = full * k + min(k, rest)
    return -(-3 * kept // 2) + -(-kept // 4) + 2 * -(-numel // chunk)


def _slices(numel: int, num_clusters: int, granularity: int) -> list[tuple[int, int]]:
    units = -(-numel // granularity)
    cuts = [min(units * m // num_clusters * granularity, numel) for m in range(num_clusters + 1)]
    return [(cuts[m], cuts[m + 1]) for m in range(num_clusters)]


@lru_cache(maxsize=4096)
def largest_rank(m: int, n: int, coding: Coding) -> int:
    """Return the largest rank at which factors of a matrix still save enough."""
    per_direction = format_of(coding.factor_wire).num_bytes(1024 * (m + n)) / 1024
    coded = format_of(coding.wire, coding.group_size).num_bytes(m * n)
    return min(int(coded / (coding.min_saving * per_direction)), m - 1, n - 1)


def is_factored(slot: Slot, coding: Coding) -> bool:
    """Whether a parameter travels in factors; split ones do, put together on one rank."""
    if coding.type != "low_rank" or slot.is_small or any(p in slot.name for p in coding.exclude):
        return False
    m, n = _two_sides(slot)
    needed = min(coding.least_rank, min(m, n) - 1)
    return slot.is_whole and largest_rank(m, n, coding) >= max(needed, 1)


def parts_of(fragment: Fragment, coding: Coding, num_tensors: int) -> Parts:
    """Return a rank's fragment as a codec sees it; `num_tensors` are those of the whole one."""
    coded: list[Slot] = []
    factored: list[Slot] = []
    small = 0
    for slot in fragment.layout:
        if slot.is_small:
            small += slot.numel
        elif is_factored(slot, coding):
            factored.append(slot)
        else:
            coded.append(slot)
    return Parts(
        fragment.id,
        fragment.numel,
        num_tensors,
        _runs(coded),
        _runs(factored),
        tuple(_two_sides(slot) for slot in factored),
        small,
    )


def _two_sides(slot: Slot) -> tuple[int, int]:
    whole = slot.whole or slot.shape
    return whole[0], math.prod(whole[1:])


def _runs(slots: Sequence[Slot]) -> tuple[int, ...]:
    """Return the lengths of stretches without gaps."""
    found: list[list[int]] = []
    for slot in slots:
        if found and found[-1][1] == slot.offset:
            found[-1][1] = slot.offset + slot.numel
        elif slot.numel:
            found.append([slot.offset, slot.offset + slot.numel])
    return tuple(stop - start for start, stop in found)
