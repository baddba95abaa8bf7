"""Low-rank averaging: two thin factors per matrix instead of the matrix, with a warm start.

Source: PowerSGD (arXiv:1905.13727, Alg. 1-2), as in DiLoCoX (arXiv:2506.21263, Sec. 2.4). Per
matrix M_k `[m, n]` of cluster k, with Q `[n, r]` from the last round:

    P = mean_k(M_k Q);  P = orthonormal columns of P (Householder QR);  Q = mean_k(M_k^T P)
    applied by all: P Q^T;   residual: e_k = M_k - P (own Q_k)^T

The mean of (P P^T M_k) is P P^T of the mean, so averages of factors lose nothing by averaging.
One power iteration a round, two in the first one and after the rank has changed.

Each factor has one owner, so that all clusters have about as much to average (blocks.py): the
others send it their codes; it sums in cluster order, does the QR of a P, and sends codes of the
mean that everybody, itself included, decodes (factors.py: an exact integer product, so all clusters
apply the same bits).

A matrix that is split over ranks is put together on one of them first (whole_matrices.py), so the
result does not depend on shards. Matrices for which factors save less than `min_saving` against
`wire`, and those whose name contains one of `exclude` (embeddings, output heads), travel as
`Quantized` does; so does everything in the first `dense_rounds` and in every
`full_round_every`-th round, since low-rank rounds from the start, or alone, keep the training in
one subspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from dsx.compress.base import Channel, Launch
from dsx.compress.owners import (
    NUM_PROBES,
    FactorBytes,
    down_bytes,
    factor_bytes,
    factor_rounds,
    two_sides,
    up_bytes,
    warm_bytes,
)
from dsx.compress.pieces import LOST_NUMEL, rows_at_once, side_work
from dsx.compress.quantized import (
    NARROW,
    Feedback,
    Quantized,
    residual_work,
    small_bytes,
    small_work,
)
from dsx.compress.slices import LOST_TOGETHER, Rounds, Sizes, most_by_role, most_work, no_rounds
from dsx.compress.wire.base import Wire
from dsx.compress.wire.formats import FORMATS, is_made_in_place
from dsx.core.buffers import Opening
from dsx.core.checks import require_choice
from dsx.core.membership import Seat
from dsx.core.registry import register
from dsx.core.types import Fragment, Slot, runs_of

FactorWire = Literal["fp32", "int8", "int4"]
LEAST_RANK = 4  # what a matrix must allow where the rank is a controller's
HEADS = ("embed", "wte", "wpe", "lm_head", "output_layer")


@register("compression", "low_rank")
@dataclass(frozen=True)
class LowRank(Quantized):
    """Two thin factors per matrix (PowerSGD), quantized; everything else as `quantized` sends it.

    Error feedback is on: without it what the factors miss is lost. `rank` is r; None leaves it to
    a controller. `factor_wire` is what clusters send. Means return in int8; in fp32 if that is
    fp32, which all apply alike only where GEMMs round alike.
    """

    error_feedback: Feedback = "fp32"
    """How what codes and factors miss is kept to be sent later; none: it is lost."""
    rank: Annotated[int | None, Ge(1)] = None
    """The rank r of the factors, at least 1; null: a controller chooses it."""
    factor_wire: FactorWire = "int8"
    """The format of the factors that a cluster sends."""
    dense_rounds: Annotated[int, Ge(0)] = 0
    """The first rounds that send everything as `quantized` does."""
    full_round_every: Annotated[
        int | None, Ge(2), "every round would be dense; use type 'quantized' for that"
    ] = None
    """Every so many rounds one sends everything as `quantized` does, at least 2; null: none."""
    min_saving: Annotated[float, Ge(1), "below that, factors are larger than what they replace"] = (
        1.3
    )
    """Factors are for matrices that they make smaller by this factor or more, at least 1."""
    exclude: tuple[str, ...] = HEADS
    """Matrices whose name contains one of these texts travel as `quantized`, not in factors."""

    captures_spectrum = True
    needs_whole_matrices = True
    takes_turns = True
    encodes_at_launch = False  # what factors carry of a cluster is known once the mean P is there

    def validate(self) -> None:
        """Require what `Quantized` does, a rank of at least 1, and sensible rounds."""
        super().validate()
        require_choice("compression.factor_wire", self.factor_wire, FactorWire)
        if self.mean_wire in NARROW:
            raise ValueError(
                f"compression.mean_wire={self.mean_wire!r}: owners keep nothing of what the means "
                "of dense rounds lose, which is too much in so few bits; use 'int8'"
            )
        if self.mean_feedback == "fp32":
            raise ValueError(
                "compression.mean_feedback='fp32': owners keep nothing of what means of factors "
                "and of dense rounds lose; leave it out"
            )
        if not all(self.exclude):
            raise ValueError(
                f"compression.exclude={self.exclude!r}: an empty text is part of every name; give "
                "parts of parameters' names, or an empty list"
            )

    @property
    def is_fine(self) -> bool:
        """Never: factors miss what is not of the first ranks."""
        return False

    @property
    def makes_factors(self) -> bool:
        """Unless means travel in fp32: their product rounds as a device does."""
        return self.factor_wire != "fp32"

    @property
    def factor_format(self) -> Wire:
        """The format of factors on their way to the owner."""
        return FORMATS[self.factor_wire]()

    def largest_rank(self, slot: Slot) -> int:
        """Return the largest rank that saves enough for a matrix, at most min(m, n) - 1."""
        return _largest_rank(self, *two_sides(slot))

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

    def usual_bytes(self, slot: Slot, max_rank: int) -> int:
        """Return those of the factors of a matrix, of codes, or of a vector."""
        if slot.is_small:
            return FORMATS[self.small_wire]().num_bytes(slot.numel) + 4 * slot.numel
        if not self.takes(slot):
            return self.up.num_bytes(slot.numel) + self.down.num_bytes(slot.numel)
        (m, n), wire = two_sides(slot), self.factor_format
        rank = min(max_rank or self.rank or LEAST_RANK, self.largest_rank(slot))
        up = up_bytes(wire, rank + NUM_PROBES, m) + up_bytes(wire, rank, n)
        return up + sum(down_bytes(wire.is_exact, rank, side) for side in (m, n))

    def is_dense_round(self, round: int) -> bool:
        """Whether a round sends everything as `Quantized` does."""
        every = self.full_round_every
        return round <= self.dense_rounds or (every is not None and round % every == 0)

    @property
    def usual_round(self) -> int:
        """Return the second round in factors: the first one iterates twice."""
        return next(r for r in count(self._first_in_factors + 1) if not self.is_dense_round(r))

    @property
    def _first_in_factors(self) -> int:
        return next(r for r in count(1) if not self.is_dense_round(r))

    def open(
        self, fragment: Fragment, seat: Seat, max_rank: int, opening: Opening | None = None
    ) -> Channel:
        """Return the channel of one fragment; `max_rank` is the most a controller may ask for."""
        from dsx.compress.low_rank_channel import LowRankChannel

        most = max_rank or self.rank or 0
        return LowRankChannel(self, fragment, seat, most, opening or Opening())

    def traffic(
        self, fragment: Fragment, num_clusters: int, launch: Launch, shard: int = 0
    ) -> Rounds:
        """Return those of a dense round, or of the factors with the rest beside them."""
        if self.is_dense_round(launch.round):
            return self.coded_traffic(fragment, fragment.coded_runs, num_clusters)
        taken, rest = self.split(fragment)
        rank, factors = self.rank_of(launch), no_rounds(num_clusters)
        if taken and num_clusters > 1:
            first = (fragment.id + shard) % num_clusters
            matrices = self._matrices(taken, rank)
            most = tuple(m[2] for m in self._matrices(taken, launch.most_rank or rank))
            factors = factor_rounds(matrices, most, self.factor_format, num_clusters, first)
            if launch.round == self._first_in_factors:
                factors = np.concatenate([factors, factors])
        return self.coded_traffic(fragment, runs_of(rest), num_clusters, [factors])

    def rank_of(self, launch: Launch) -> int:
        """Return the rank of a transfer: a controller's, or the own one."""
        rank = launch.rank or self.rank
        assert rank is not None, "validate() requires a rank of the codec or of a controller"
        return rank

    def split(self, fragment: Fragment) -> tuple[list[Slot], list[Slot]]:
        """Return the slots that travel in factors, and the others that are worth a code."""
        return _split(self, fragment)

    def _matrices(self, taken: Sequence[Slot], rank: int) -> tuple[tuple[int, int, int], ...]:
        """Return `(m, n, rank)` of slots, a rank or the most that one allows: by shape but once."""
        kinds = {(slot.shape, slot.whole): slot for slot in taken}
        sized = {
            kind: (*two_sides(slot), min(rank, self.largest_rank(slot)))
            for kind, slot in kinds.items()
        }
        return tuple(sized[slot.shape, slot.whole] for slot in taken)

    def state_bytes(self, fragment: Fragment, num_clusters: int, max_rank: int) -> list[int]:
        """Return what residuals and warm starts take, and the rank that these are of."""
        taken, rest = self.split(fragment)
        kinds = (
            self.residual_bytes(runs_of(taken), num_clusters, keeps_mean=False),
            self.residual_bytes(runs_of(rest), num_clusters),
        )
        return (self._warm_bytes(fragment, max_rank) + kinds[0] + kinds[1]).tolist()

    def before_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what all takes but residuals of what is sent, which are settled."""
        _, rest = self.split(fragment)
        of_means = self.residual_bytes(runs_of(rest), num_clusters, keeps_values=False)
        return (self._warm_bytes(fragment, max_rank) + of_means).tolist()

    def _warm_bytes(self, fragment: Fragment, max_rank: int) -> int:
        """Return what warm starts take, and the rank that they are of."""
        taken, most = self.split(fragment)[0], max_rank or self.rank or 0
        is_exact = self.factor_format.is_exact
        sizes = self._matrices(taken, most)
        return 8 + sum(warm_bytes(is_exact, rank, n) for _, n, rank in sizes)

    def shared_work_bytes(self, fragment: Fragment) -> int:
        """Return what is made anew at a time of residuals that are stored in less: what factors
        miss of rows of a matrix, or some elements in codes; those that fade are in fp32 as a whole.
        """
        if self.error_feedback in ("none", "fp32") or not fragment.coded_runs:
            return 0
        taken, rest = self.split(fragment)
        together = FORMATS[self.error_feedback]().granularity
        in_codes = runs_of(rest)
        if self.dense_rounds or self.full_round_every:
            in_codes = [*in_codes, *runs_of(taken)]
        sizes = [min(b - a, LOST_TOGETHER) for a, b in in_codes]
        sizes += [rows_at_once(m, n, LOST_NUMEL) * n for m, n in map(two_sides, taken)]
        anew = 4 * (max(sizes) + together)
        fades = not is_made_in_place(self.error_feedback, self.feedback_decay)
        return max(anew, residual_work(self.error_feedback, fragment) if fades else 0)

    def buffer_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what factors, messages, and the work space of codes take."""
        taken, rest = self.split(fragment)
        most = max_rank or self.rank or 0
        factors = self._factors(fragment, num_clusters, max_rank)
        work = self.coded_work(runs_of(rest))
        if self.dense_rounds or self.full_round_every:
            work += self.coded_work(runs_of(taken))
        else:
            work += self.storage_work(runs_of(taken))
        work.append(small_work(fragment, self.small_wire))
        beside = small_bytes(fragment, self.small_wire, num_clusters) + 4 * (most + 1) + 8
        of_matrices = np.maximum(
            factors.messages, self.message_bytes(runs_of(taken), num_clusters)
        )  # of one round or the other
        coded = self.message_bytes(runs_of(rest), num_clusters)
        messages = of_matrices + coded
        return (messages + factors.probes + beside + most_work(work)).tolist()

    def work_in_turn(
        self, fragment: Fragment, num_clusters: int, max_rank: int
    ) -> Mapping[str, Sizes]:
        """Return what matrices work in."""
        return self._factors(fragment, num_clusters, max_rank).work

    def side_work(self, fragment: Fragment, max_rank: int) -> Mapping[str, int]:
        """Return what pieces of matrices and their factors take."""
        matrices = self._matrices(self.split(fragment)[0], max_rank or self.rank or 0)
        return most_by_role(side_work(m, n, rank) for m, n, rank in matrices)

    def _factors(self, fragment: Fragment, num_clusters: int, max_rank: int) -> FactorBytes:
        """Return what factors take, of the owners by which shard 0 goes.

        Another's are those of the next clusters.
        """
        matrices = self._matrices(self.split(fragment)[0], max_rank or self.rank or 0)
        return factor_bytes(matrices, self.factor_format, num_clusters, fragment.id, self.kernels)


@lru_cache(maxsize=1024)
def _split(method: LowRank, fragment: Fragment) -> tuple[list[Slot], list[Slot]]:
    taken: list[Slot] = []
    rest: list[Slot] = []
    for slot in fragment.layout:
        if not slot.is_small:
            (taken if method.takes(slot) else rest).append(slot)
    return taken, rest


@lru_cache(maxsize=4096)
def _largest_rank(method: LowRank, m: int, n: int) -> int:
    per_direction = method.factor_format.num_bytes(1024 * (m + n)) / 1024
    most = int(method.up.num_bytes(m * n) / (method.min_saving * per_direction))
    return min(most, m - 1, n - 1)
