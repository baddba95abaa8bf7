"""The channel of `LowRank`: the matrices in factors, the rest in codes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from dsx.compress.base import CodingError, Launch
from dsx.compress.blocks import Owners, factor_owners
from dsx.compress.coded_runs import SmallPart, can_recode, coding_errors
from dsx.compress.factor_products import HostProducts, SideProducts
from dsx.compress.low_rank_factor import Factor
from dsx.compress.low_rank_matrix import LowRankMatrix
from dsx.compress.owners import factor_sizes, two_sides
from dsx.compress.quantized_channel import CodedPart, part_seed
from dsx.core.buffers import Opening, Overlay
from dsx.core.exchange import Exchange, ExchangeRound, in_turn, together
from dsx.core.membership import Seat
from dsx.core.types import Fragment, Slot, runs_of

if TYPE_CHECKING:
    from dsx.compress.low_rank import LowRank


class LowRankChannel:
    """The matrices in factors, the rest in codes.

    `spectrum` `[max_rank + 1]`: of the matrices whose P this cluster averages, in the round just
    ended, the squared singular values kept, summed over matrices, and at the end |mean M|_F^2 to
    match, from what random probes g tell of what is missed: M g travels with P. Zeros after a dense
    round.
    """

    def __init__(
        self,
        method: LowRank,
        fragment: Fragment,
        seat: Seat,
        max_rank: int,
        opening: Opening,
    ) -> None:
        self._method = method
        self._seat = seat
        taken, rest = method.split(fragment)
        self._opening = opening
        sides = [two_sides(s) for s in taken]
        ranks = [min(max_rank, method.largest_rank(s)) for s in taken]
        matrices = tuple((m, n, rank) for (m, n), rank in zip(sides, ranks, strict=True))
        owners = factor_owners(matrices, seat.num_clusters, fragment.id + seat.shard)
        # a round has factors or, of the same matrices, codes
        memory = self._memory(taken, zip(ranks, owners, strict=True))
        messages = Overlay(memory, opening.buffers)
        products = HostProducts() if opening.side is None else SideProducts(opening.side)
        self._matrices = [
            LowRankMatrix(s, rank, seat, by, opening, method, messages, products)
            for s, rank, by in zip(taken, ranks, owners, strict=True)
        ]
        self._rest = self._coded_parts(rest, fragment.id, 0, opening)
        in_place = replace(opening, buffers=Overlay(memory, opening.buffers))
        self._dense = self._coded_parts(taken, fragment.id, 500, in_place, keeps_mean=False)
        self._small = SmallPart(method.small_wire, fragment, seat, opening)
        self._rank = opening.state.zeros(1, dtype="int64")  # of the round before; 0: none yet
        self._probed = opening.buffers.zeros(1, dtype="int64")  # the round that was probed last
        self.spectrum = opening.buffers.zeros(max_rank + 1)

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """Warm starts, residuals, and the rank they are of."""
        named: dict[str, Tensor] = {"rank": self._rank}
        for matrix in self._matrices:
            named |= matrix.warm.slots
        return {**named, **{name: error.residual.stored for name, error in self.errors.items()}}

    @property
    def errors(self) -> Mapping[str, CodingError]:
        """The residuals of everything that is coded, matrices included."""
        return {**coding_errors("rest", self._rest), **coding_errors("residual", self._dense)}

    @property
    def settled(self) -> Collection[str]:
        """The residuals of what is sent."""
        return [name for name, error in self.errors.items() if not error.is_of_mean]

    @property
    def probes(self) -> Mapping[str, Tensor]:
        """What the matrices' probes have seen."""
        return {"round": self._probed, **{m.name: m.probed for m in self._matrices}}

    def take_in(self, x: Tensor, launch: Launch) -> None:
        """Probe the matrices, and add to everything what was lost before."""
        if not self._method.is_dense_round(launch.round):
            rank = self._method.rank_of(launch)
            for matrix in self._matrices:
                matrix.begin(x, min(rank, matrix.max_rank), launch.round)
            if int(self._probed) != launch.round:
                self._probed.zero_()  # none, while they are made
                with self._opening.turns.lock:
                    for matrix in self._matrices:
                        matrix.probe()
                self._probed.fill_(launch.round)
        for part in (*self._rest, *self._dense):
            part.take_in(x)

    def settle(self, x: Tensor, launch: Launch) -> None:
        """Let every residual be what the own codes, or the own factors, miss of `x`."""
        self.take_in(x, launch)
        is_dense = self._method.is_dense_round(launch.round)
        for part in (*self._rest, *(self._dense if is_dense else ())):
            part.settle(x)
        for part in () if is_dense else self._dense:
            if part.residual is not None:
                own = [m for m in self._matrices if part.start <= m.offset < part.stop]
                most = max(matrix.lost_at_once for matrix in own)
                with part.residual.made_anew(most) as anew, self._opening.turns.lock:
                    for matrix in own:  # in order, and nothing between them
                        matrix.write_lost(anew.room)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x` in place; all clusters decode the same bytes."""
        self.spectrum.zero_()
        self.take_in(x, launch)
        parts: list[Generator[ExchangeRound, None, object]] = [
            part.exchange(x, launch) for part in self._rest
        ]
        if self._method.is_dense_round(launch.round):
            parts += [part.exchange(x, launch) for part in self._dense]
        elif self._matrices:
            parts.append(in_turn(self._exchange_factors(launch), lambda: self._opening.turns.lock))
        yield from together(*parts, self._small.exchange(x, launch))
        return x

    def can_recode(self, launch: Launch) -> bool:
        """In dense rounds, as codes: what factors leave is made with the mean P."""
        is_dense = self._method.is_dense_round(launch.round) or not self._matrices
        return is_dense and can_recode([*self._rest, *self._dense])

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Encode the runs once more, for their residuals."""
        self.take_in(x, launch)
        for part in (*self._rest, *self._dense):
            part.recode(x, launch)

    def _exchange_factors(self, launch: Launch) -> Generator[ExchangeRound, None, None]:
        rank = self._method.rank_of(launch)
        has_residual = any(part.residual is not None for part in self._dense)
        is_cold = int(self._rank) != rank
        for _ in range(2 if is_cold else 1):
            for matrix in self._matrices:
                matrix.encode_p()
            yield from self._average_p()
            for matrix in self._matrices:
                matrix.encode_q()
            yield from self._average_q()
            for matrix in self._matrices:
                matrix.take_q()
        for matrix in self._matrices:
            matrix.write_mean()
            if matrix.averages_p:
                squares, total = matrix.spectrum(has_residual)
                self.spectrum[: matrix.rank] += squares
                self.spectrum[-1] += total
        self._rank.fill_(rank)

    def _average_p(self) -> Generator[ExchangeRound, None, None]:
        """Send every block of P to its owner; make P orthonormal, and send it to all."""
        matrices, here = self._matrices, self._seat.position
        yield from self._to_owners([matrix.p for matrix in matrices])
        for matrix in matrices:
            matrix.average_p()
        if any(matrix.is_cut for matrix in matrices):
            yield self._round(
                lambda c: [t for m in matrices for t in m.told(here, c)],
                lambda c: [t for m in matrices for t in m.told(c, here)],
            )
            for matrix in matrices:
                matrix.gather_p()
            yield self._round(
                lambda c: [t for m in matrices for t in m.handed_back(here, c)],
                lambda c: [t for m in matrices for t in m.handed_back(c, here)],
            )
        if self._seat.num_clusters > 1:
            yield self._round(
                lambda c: [t for m in matrices for t in m.p_from(here, c)],
                lambda c: [t for m in matrices for t in m.p_from(c, here)],
            )

    def _average_q(self) -> Generator[ExchangeRound, None, None]:
        """Send every block of Q to its owner, and the owners' means to all."""
        matrices, here = self._matrices, self._seat.position
        yield from self._to_owners([matrix.q for matrix in matrices])
        for matrix in matrices:
            matrix.average_q()
        if self._seat.num_clusters > 1:
            yield self._round(
                lambda c: [t for m in matrices for t in m.q.means_of(here)],
                lambda c: [t for m in matrices for t in m.q.means_of(c)],
            )

    def _to_owners(self, factors: Sequence[Factor]) -> Generator[ExchangeRound, None, None]:
        if self._seat.num_clusters > 1:
            yield self._round(
                lambda c: [t for factor in factors for t in factor.sent_to(c)],
                lambda c: [t for factor in factors for t in factor.received_from(c)],
            )

    def _round(
        self, outgoing: Callable[[int], list[Tensor]], incoming: Callable[[int], list[Tensor]]
    ) -> ExchangeRound:
        clusters = range(self._seat.num_clusters)
        return ExchangeRound([outgoing(c) for c in clusters], [incoming(c) for c in clusters])

    def _memory(self, taken: Sequence[Slot], by_matrix: Iterable[tuple[int, Owners]]) -> Tensor:
        """Return memory for the messages of matrices, in factors or in codes, uint8."""
        method, seat = self._method, self._seat
        in_codes = method.message_bytes(runs_of(taken), seat.num_clusters)[seat.position]
        in_factors = 0
        for rank, owners in by_matrix:
            sizes = factor_sizes(rank, method.factor_format, owners, seat.position)
            in_factors += sizes.num_bytes(seat.num_clusters)
        return self._opening.buffers.zeros(max(int(in_codes), in_factors), dtype="uint8")

    def _coded_parts(
        self,
        slots: list[Slot],
        fragment: int,
        first: int,
        opening: Opening,
        keeps_mean: bool = True,
    ) -> list[CodedPart]:
        ranges = runs_of(slots)
        seeds = [part_seed(fragment, first + i, self._seat) for i in range(len(ranges))]
        return [
            CodedPart(self._method, a, b, self._seat, seed, keeps_mean, opening, True)
            for (a, b), seed in zip(ranges, seeds, strict=True)
        ]
