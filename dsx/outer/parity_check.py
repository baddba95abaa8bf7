"""Before a transfer: does everybody send finite numbers, and does everybody hold the same model?

A header goes to every peer ahead of a fragment's codes, in the launch handshake: whether this
cluster's values are finite and it took a step at all, how large they are (for guard.py), the round
and a 64-bit hash of the mean it decoded last, and every few rounds a hash of its anchor at the
launch. Everyone so knows the same:

- a cluster with a NaN or an infinity, or with values so much larger than the others' that no
  training makes them: the round is refused by all, nothing is applied, and the message names it;
- a cluster that skipped every inner step of the round, its gradients not being finite: it has
  nothing new, and recovery.py tells of it;
- a different hash: a mean was decoded differently, or a bit of an anchor has flipped, so outer
  parameters have diverged, which no later round would mend. What that cluster would send is
  measured from a wrong anchor: the round is left out before anything is coded. Who is right is
  decided by the majority, and what is done by recovery.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from dsx.core.buffers import Buffers
from dsx.core.exchange import HEADER, ExchangeRound, to_all
from dsx.core.membership import Seat
from dsx.outer.bit_hash import BitHash

ANCHOR, MEAN = 1, 2  # what differs; a mean says more, as the anchor follows from it
_IS_FINITE, _IS_IDLE, _FLAG_BITS = 1, 2, 2
_LOW_BITS = 32  # of flags and round; the bits of an fp32 square above, whose sign is 0


@dataclass
class ParityResult:
    """What the headers of one transfer said: clusters by id.

    A round may be refused because of a cluster that has left since. `apart` holds pairs of
    clusters whose hashes differ, and of what; `differing` those that are not in the right.
    """

    refused_by: list[int] = field(default_factory=list[int])
    differing: list[int] = field(default_factory=list[int])
    round: int = 0  # of the mean that was decoded last
    is_refused: bool = False
    idle_in: list[int] = field(default_factory=list[int])  # took no inner step in the round
    is_idle: bool = False  # this cluster's own
    apart: list[list[int]] = field(default_factory=list[list[int]])
    anchor: int | Tensor = 0  # this cluster's own hash; 0 in rounds that do not compare it
    uncommitted: list[int] = field(default_factory=list[int])  # came to another result, each time
    too_large: list[int] = field(default_factory=list[int])  # of `refused_by`, finite though
    ids: list[int] = field(default_factory=list[int], compare=False)  # who has averaged
    # of the guard's samples: this cluster's own square, [id, square] of all, sums when applied
    square: float = field(default=0.0, compare=False)
    squares: list[list[float]] = field(default_factory=list[list[float]], compare=False)
    sums: list[float] = field(default_factory=list[float], compare=False)

    @classmethod
    def of_saved(cls, saved: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> ParityResult:
        """Put together what ranks have saved of one transfer, for the clusters of these ids.

        dsx 0.2 knew of a first cluster that all others were compared with.
        """
        apart: set[tuple[int, ...]] = set()
        for entry in saved:
            wrong = entry["differing"]
            old = [(*sorted((a, b)), MEAN) for a in wrong for b in ids if b not in wrong]
            apart |= {tuple(pair) for pair in entry.get("apart", old) if {*pair[:2]} <= {*ids}}
        refused_by, differing, idle_in, uncommitted, too_large = (
            sorted({m for entry in saved for m in entry.get(key, ()) if m in ids})
            for key in ("refused_by", "differing", "idle_in", "uncommitted", "too_large")
        )
        own_squares = saved[0].get("squares", []) if len(saved) == 1 else []  # of the same shard
        return cls(
            refused_by,
            differing,
            max(entry["round"] for entry in saved),
            any(entry["is_refused"] for entry in saved),
            idle_in,
            apart=[list(pair) for pair in sorted(apart)],
            squares=[list(pair) for pair in own_squares],
            uncommitted=uncommitted,
            too_large=too_large,
            ids=sorted({m for entry in saved for m in entry.get("ids", ids) if m in ids}),
        )


@dataclass(frozen=True)
class Sides:
    """Who agrees with whom: `right` hold the same, `wrong` something else; ids."""

    right: list[int]
    wrong: list[int]
    is_majority: bool  # more than half of all; else `right` is the side of the first one

    @classmethod
    def of(
        cls, ids: Sequence[int], apart: Collection[tuple[int, int]], refused_by: Collection[int]
    ) -> Sides:
        """Return the sides, the same on every cluster: more than half are right.

        Where there is no majority, it is those who hold what the first one does; the first one
        that sends finite values, if there is one.
        """
        sides = [[b for b in ids if (a, b) not in apart and (b, a) not in apart] for a in ids]
        largest = max(sides, key=len)
        is_majority = 2 * len(largest) > len(ids)
        if not is_majority:
            finite = [side for id, side in zip(ids, sides, strict=True) if id not in refused_by]
            largest = (finite or sides)[0]
        return cls(largest, [id for id in ids if id not in largest], is_majority)


class ParityCheck:
    """One fragment's headers; `memory` `[round, hash]` int64 belongs to the checkpoint."""

    def __init__(
        self,
        seat: Seat,
        buffers: Buffers | None = None,
        max_norm_ratio: float | None = None,
    ) -> None:
        self._seat = seat
        self._max_norm_ratio = max_norm_ratio
        self.memory = torch.zeros(2, dtype=torch.int64)
        self._own = torch.zeros(3, dtype=torch.int64)
        self._theirs = [torch.zeros(3, dtype=torch.int64) for _ in range(seat.num_clusters)]
        self._hash = BitHash(buffers)

    def exchange(
        self, is_finite: bool, parity: ParityResult
    ) -> Generator[ExchangeRound, None, None]:
        """Tell the peers, and fill `parity` from what they told."""
        flags = _IS_FINITE * is_finite | _IS_IDLE * parity.is_idle
        parity.anchor = int(parity.anchor)
        own = flags | int(self.memory[0]) << _FLAG_BITS
        self._own[0] = own | bits_of(parity.square if is_finite else 0.0) << _LOW_BITS
        self._own[1], self._own[2] = self.memory[1], parity.anchor
        self._theirs[self._seat.position].copy_(self._own)
        if self._seat.num_clusters > 1:
            yield to_all([self._own], [[header] for header in self._theirs], HEADER)
        headers = {
            id: header.tolist() for id, header in zip(self._seat.ids, self._theirs, strict=True)
        }
        parity.ids = [*self._seat.ids]
        parity.squares = [[id, of_bits(header[0] >> _LOW_BITS)] for id, header in headers.items()]
        for header in headers.values():
            header[0] &= (1 << _LOW_BITS) - 1
        parity.refused_by = [id for id, header in headers.items() if not header[0] & _IS_FINITE]
        parity.idle_in = [id for id, header in headers.items() if header[0] & _IS_IDLE]
        parity.too_large = too_large(parity, self._max_norm_ratio)
        parity.refused_by = sorted({*parity.refused_by, *parity.too_large})
        means = {id: (header[0] >> _FLAG_BITS, header[1]) for id, header in headers.items()}
        anchors = {id: header[2] for id, header in headers.items()}
        parity.apart = [
            [a, b, MEAN if means[a] != means[b] else ANCHOR]
            for a in headers
            for b in headers
            if a < b and (means[a] != means[b] or anchors[a] != anchors[b])
        ]
        pairs = {(a, b) for a, b, _ in parity.apart}
        parity.differing = Sides.of(self._seat.ids, pairs, parity.refused_by).wrong
        parity.is_refused = bool(parity.refused_by or parity.apart)
        parity.round = max(round for round, _ in means.values())
        if parity.apart:
            self.memory.zero_()  # told, on all sides; the next header starts anew

    def remember(self, round: int, mean_hash: int) -> None:
        """Keep round and hash of the mean that all have just committed, for the next header."""
        self.memory[0], self.memory[1] = round, mean_hash

    def hash_of(self, x: Tensor) -> int:
        """Return the hash of a vector, fp32 `[n]` on the CPU; allocates nothing after the first."""
        return int(self._hash.of(x))


def too_large(parity: ParityResult, max_norm_ratio: float | None) -> list[int]:
    """Return the clusters whose norm is more than so many times the median of all; of two, the
    smaller one.

    Of those that are finite, have taken a step and have sent more than zeros: others say nothing of
    what is usual.
    """
    silent = {*parity.refused_by, *parity.idle_in}
    squares = [(int(id), s) for id, s in parity.squares if s > 0 and id not in silent]
    if max_norm_ratio is None or not squares:
        return []
    most = max_norm_ratio**2 * median_low(square for _, square in squares)
    return [id for id, square in squares if square > most]


def bits_of(square: float) -> int:
    """Return the bits of a number in fp32, of inf if it is beyond that."""
    try:
        return int.from_bytes(struct.pack("<f", square), "little")
    except OverflowError:
        return bits_of(math.inf)


def of_bits(bits: int) -> float:
    """Return the number that `bits_of` was given, in fp32; NaN for what is below 0."""
    return math.nan if bits < 0 else struct.unpack("<f", bits.to_bytes(4, "little"))[0]
