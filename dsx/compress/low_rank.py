"""Low-rank averaging: two thin factors per matrix instead of the matrix, with a warm start.

Source: PowerSGD (arXiv:1905.13727, Alg. 1-2), as in DiLoCoX (arXiv:2506.21263, Sec. 2.4). Per
matrix M_k `[m, n]` of cluster k, with Q `[n, r]` from the last round:

    P = mean_k(M_k Q);  P = orthonormal columns of P (Householder QR);  Q = mean_k(M_k^T P)
    applied by all: P Q^T;   residual: e_k = M_k - P (own Q_k)^T

The mean of (P P^T M_k) is P P^T of the mean, so averages of factors lose nothing by averaging.
One power iteration a round, two in the first one and after the rank has changed.

Each factor has one owner, so that all clusters have about as much to average (owners.py): the
others send it their codes; it sums in cluster order, does the QR of a P, and sends codes of the
mean that everybody, itself included, decodes (factors.py: an exact integer product, so all clusters
apply the same bits).

A matrix that is split over ranks is put together on one of them first (redistribution.py), so the
result does not depend on shards. Matrices for which factors save less than `min_saving` against
`wire`, and those whose name contains one of `exclude` (embeddings, output heads), travel as
`Quantized` does; so does everything in the first `dense_rounds` and in every
`full_round_every`-th round, since low-rank rounds from the start, or alone, keep the training in
one subspace.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsx.compress.base import Channel, CodingError, Launch
from dsx.compress.low_rank_matrix import LowRankMatrix, WorkSpace
from dsx.compress.owners import factor_owners
from dsx.compress.quantized import (
    CodedPart,
    Feedback,
    Quantized,
    SmallPart,
    coding_errors,
    merged,
    part_seed,
)
from dsx.compress.wire.base import Wire
from dsx.compress.wire.formats import FORMATS
from dsx.core.checks import require_choice
from dsx.core.exchange import Exchange, Peers, Swap, to_all, together
from dsx.core.types import Fragment, Slot

FactorWire = Literal["fp32", "int8", "int4"]
LEAST_RANK = 4  # what a matrix must allow where the rank is a controller's
HEADS = ("embed", "wte", "wpe", "lm_head", "output_layer")


@dataclass(frozen=True)
class LowRank(Quantized):
    """PowerSGD's factors, quantized; the fields of `Quantized` are for everything else.

    Error feedback is on: without it what the factors miss is lost. `rank` is r; None leaves it to
    a controller. `factor_wire` is what clusters send. Means return in int8; in fp32 if that is
    fp32, which all apply alike only where GEMMs round alike.
    """

    error_feedback: Feedback = "fp32"
    rank: int | None = None
    factor_wire: FactorWire = "int8"
    dense_rounds: int = 0
    full_round_every: int | None = None
    min_saving: float = 1.3
    exclude: tuple[str, ...] = HEADS

    captures_spectrum = True
    needs_whole_matrices = True

    def validate(self) -> None:
        """Require what `Quantized` does, a rank of at least 1, and sensible rounds."""
        super().validate()
        require_choice("compression.factor_wire", self.factor_wire, FactorWire)
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"compression.rank={self.rank} must be at least 1")
        if self.dense_rounds < 0:
            raise ValueError(f"compression.dense_rounds={self.dense_rounds} must be at least 0")
        if self.full_round_every is not None and self.full_round_every < 2:
            raise ValueError(
                f"compression.full_round_every={self.full_round_every} must be at least 2: every "
                "round would be dense; use type 'quantized' for that"
            )
        if not all(self.exclude):
            raise ValueError(
                f"compression.exclude={self.exclude!r}: an empty text is part of every name; give "
                "parts of parameters' names, or an empty list"
            )
        if not self.min_saving >= 1:
            raise ValueError(
                f"compression.min_saving={self.min_saving} must be at least 1: below that, factors "
                "are larger than what they replace"
            )

    @property
    def factor_format(self) -> Wire:
        """The format of factors on their way to the owner."""
        return FORMATS[self.factor_wire]()

    def largest_rank(self, slot: Slot) -> int:
        """Return the largest rank that saves enough for a matrix, at most min(m, n) - 1."""
        m, n = two_sides(slot)
        dense, factor = self.up, self.factor_format
        per_direction = factor.num_bytes(1024 * (m + n)) / 1024
        most = int(dense.num_bytes(m * n) / (self.min_saving * per_direction))
        return min(most, m - 1, n - 1)

    @property
    def sends_exactly(self) -> bool:
        """Never: factors miss something."""
        return False

    @property
    def coded_formats(self) -> tuple[str, ...]:
        """The factors' too."""
        return (*super().coded_formats, self.factor_wire)

    def takes(self, slot: Slot) -> bool:
        """Whether a slot travels in factors."""
        if slot.is_small or not slot.is_whole or any(part in slot.name for part in self.exclude):
            return False
        needed = min(self.rank or LEAST_RANK, min(two_sides(slot)) - 1)
        return self.largest_rank(slot) >= max(needed, 1)

    def is_dense_round(self, round: int) -> bool:
        """Whether a round sends everything as `Quantized` does."""
        every = self.full_round_every
        return round <= self.dense_rounds or (every is not None and round % every == 0)

    def open(self, fragment: Fragment, peers: Peers, max_rank: int) -> Channel:
        """Return the channel of one fragment; `max_rank` is the most a controller may ask for."""
        return LowRankChannel(self, fragment, peers, max_rank or self.rank or 0)

    def state_bytes(self, fragment: Fragment, peers: Peers, max_rank: int) -> int:
        """Return what residuals and warm starts take."""
        taken = [s for s in fragment.layout if self.takes(s)]
        rest = [s for s in fragment.layout if not s.is_small and not self.takes(s)]
        kept = _warm_bytes(self, taken, max_rank or self.rank or 0)
        for slots, keeps_mean in ((taken, False), (rest, True)):
            for start, stop in merged([(s.offset, s.offset + s.numel) for s in slots]):
                kept += self._run_bytes(stop - start, peers, keeps_mean)
        return kept


def _warm_bytes(method: LowRank, slots: list[Slot], max_rank: int) -> int:
    """Return what the warm starts of matrices take, and the rank they are of."""
    ranks = [min(max_rank, method.largest_rank(s)) for s in slots]
    return 8 + sum(4 * r * two_sides(s)[1] for r, s in zip(ranks, slots, strict=True))


class LowRankChannel:
    """The matrices in factors, the rest in codes.

    `spectrum` `[max_rank + 1]`: of the matrices whose P this cluster averages, in the round just
    ended, the squared singular values kept, summed over matrices, and at the end |mean M|_F^2 to
    match, from what random probes g tell of what is missed: M g travels with P. Zeros after a dense
    round.
    """

    def __init__(self, method: LowRank, fragment: Fragment, peers: Peers, max_rank: int) -> None:
        self._method = method
        self._peers = peers
        taken = [s for s in fragment.layout if method.takes(s)]
        rest = [s for s in fragment.layout if not s.is_small and not method.takes(s)]
        sides, work_space = [two_sides(s) for s in taken], WorkSpace()
        owners = factor_owners(sides, peers.num_clusters, fragment.id + peers.shard)
        self._matrices = [
            LowRankMatrix(s, min(max_rank, method.largest_rank(s)), peers, by, work_space, method)
            for s, by in zip(taken, owners, strict=True)
        ]
        self._rest = self._coded_parts(rest, fragment.id, 0)
        self._dense = self._coded_parts(taken, fragment.id, 500, keeps_mean=False)
        self._small = SmallPart(method.small_wire, fragment.layout, peers)
        self._rank = torch.zeros(1, dtype=torch.int64)  # of the round before; 0: none yet
        self.spectrum = torch.zeros(max_rank + 1)

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """Warm starts, residuals, and the rank they are of."""
        named: dict[str, Tensor] = {"rank": self._rank}
        for matrix in self._matrices:
            named[f"q.{matrix.name}"] = matrix.warm
        return {**named, **{name: error.residual.stored for name, error in self.errors.items()}}

    @property
    def errors(self) -> Mapping[str, CodingError]:
        """The residuals of everything that is coded, matrices included."""
        return {**coding_errors("rest", self._rest), **coding_errors("residual", self._dense)}

    def payload_bytes(self, launch: Launch) -> int:
        """Return what a round with one power iteration sends, or a dense one."""
        total = self._small.bytes_sent + sum(part.bytes_sent for part in self._rest)
        if self._method.is_dense_round(launch.round):
            return total + sum(part.bytes_sent for part in self._dense)
        rank = self._rank_of(launch)
        return total + sum(m.payload_bytes(min(rank, m.max_rank)) for m in self._matrices)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x` in place; all clusters decode the same bytes."""
        self.spectrum.zero_()
        parts: list[Generator[Swap, None, object]] = [
            part.exchange(x, launch) for part in self._rest
        ]
        if self._method.is_dense_round(launch.round):
            parts += [part.exchange(x, launch) for part in self._dense]
        elif self._matrices:
            parts.append(self._exchange_factors(x, launch))
        yield from together(*parts, self._small.exchange(x))
        return x

    def _exchange_factors(self, x: Tensor, launch: Launch) -> Generator[Swap, None, None]:
        rank = self._rank_of(launch)
        has_residual = any(part.residual is not None for part in self._dense)
        is_cold = int(self._rank) != rank
        for matrix in self._matrices:
            matrix.begin(x, min(rank, matrix.max_rank), launch.round)
        for part in self._dense:  # the same residual as in dense rounds
            part.add_residual(x)
        for iteration in range(2 if is_cold else 1):
            for matrix in self._matrices:
                matrix.encode_p()
            yield from self._to_owners_and_back()
            for matrix in self._matrices:
                matrix.encode_q()
            is_last = iteration == int(is_cold)
            if is_last:
                self._keep_residuals(x)
            yield from self._to_owners_and_back()
            for matrix in self._matrices:
                matrix.take_q()
        for matrix in self._matrices:
            matrix.write_mean()
            if matrix.averages_p:
                squares, total = matrix.spectrum(has_residual)
                self.spectrum[: matrix.rank] += squares
                self.spectrum[-1] += total
        self._rank.fill_(rank)

    def _rank_of(self, launch: Launch) -> int:
        rank = launch.rank or self._method.rank
        assert rank is not None, "validate() requires a rank of the codec or of a controller"
        return rank

    def _to_owners_and_back(self) -> Generator[Swap, None, None]:
        """Send every matrix's factor to its owner, and the owners' mean factors to all."""
        clusters = range(self._peers.num_clusters)
        own = [m for m in self._matrices if m.is_owned]
        if self._peers.num_clusters > 1:
            yield Swap(
                [[m.sent for m in self._matrices if m.owner == c] for c in clusters],
                [[m.received[c] for m in own] for c in clusters],
            )
        for matrix in own:
            matrix.average()
        if self._peers.num_clusters > 1:
            yield to_all(
                [m.mean for m in own],
                [[m.mean for m in self._matrices if m.owner == c] for c in clusters],
            )
        for matrix in self._matrices:
            matrix.decode_mean()

    def _keep_residuals(self, x: Tensor) -> None:
        """Let every residual be what the own factors miss of `x`."""
        for part in self._dense:
            if part.residual is not None:
                with part.residual.opened() as residual:
                    for matrix in self._matrices:
                        matrix.write_lost(residual, part.start, part.stop)

    def _coded_parts(
        self, slots: list[Slot], fragment: int, first: int, keeps_mean: bool = True
    ) -> list[CodedPart]:
        ranges = merged([(s.offset, s.offset + s.numel) for s in slots])
        seeds = [part_seed(fragment, first + i, self._peers) for i in range(len(ranges))]
        return [
            CodedPart(self._method, a, b, self._peers, seed, keeps_mean)
            for (a, b), seed in zip(ranges, seeds, strict=True)
        ]


def two_sides(slot: Slot) -> tuple[int, int]:
    """Return a parameter as a matrix: the first dimension by all the others."""
    whole = slot.whole or slot.shape
    rows = whole[0]
    return rows, slot.numel // rows
