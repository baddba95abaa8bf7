"""A mean that one cluster has and others lack, handed over after a resume.

It travels in fp32 with its sideband and what the headers told. Whoever takes it codes its own
contribution once more, so that its residuals are what the exchange would have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsx.core.exchange import Exchange, ExchangeRound
from dsx.core.membership import Seat
from dsx.outer.attempt import Attempt
from dsx.outer.channel import FragmentChannel
from dsx.outer.parity_check import ParityResult, Sides, bits_of, of_bits

PIECE = 1 << 24  # elements of a mean in one message: each has the deadline to itself


@dataclass(frozen=True)
class HandOver:
    """The mean of a fragment's round, from one cluster to those that lack it, by position."""

    round: int
    giver: int
    takers: tuple[int, ...]

    def exchange(
        self,
        numel: int,
        sideband_numel: int,
        seat: Seat,
        channel: FragmentChannel,
        attempt: Attempt | None,
    ) -> Exchange:
        """Give, take, or look on; `attempt` is the transfer's, None for who only looks on.

        `numel` elements lie on the wire. Takers' buffers and channel are then as after an exchange.
        """
        nothing = _told(ParityResult(), seat, False)
        table, wire, sideband = nothing, torch.empty(0), torch.empty(0)
        if seat.position == self.giver:
            assert attempt is not None
            buffers = attempt.buffers  # training goes on, and acts on the result
            remembers = int(channel.parity_check.memory[0]) >= self.round
            table, wire, sideband = (
                _told(buffers.parity, seat, remembers),
                buffers.wire.clone(),  # where a later launch lies once this one is applied
                buffers.sideband.values.clone(),
            )
        elif seat.position in self.takers:
            assert attempt is not None
            sideband = attempt.buffers.sideband.values
        taken = attempt if seat.position in self.takers else None
        return self._exchange(numel, table, sideband, wire, seat, channel, taken)

    def _exchange(
        self,
        numel: int,
        table: Tensor,
        sideband: Tensor,
        wire: Tensor,
        seat: Seat,
        channel: FragmentChannel,
        taken: Attempt | None,
    ) -> Exchange:
        yield self._round([table, sideband], seat)
        if taken is not None:
            taken.buffers.parity = _heard(table, taken, seat)
            with channel.before.gate:  # what was sent before may now be written
                wire = taken.buffers.begin()
            self._code_again(channel, taken)
        for start in range(0, numel, PIECE):
            yield self._round([wire[start : start + PIECE]], seat)
        if taken is not None and table[2, 2]:
            channel.parity_check.remember(self.round, channel.parity_check.hash_of(wire))
        if taken is not None:
            channel.before.ended = self.round
        return wire

    def _round(self, tensors: Sequence[Tensor], seat: Seat) -> ExchangeRound:
        gives, takes = seat.position == self.giver, seat.position in self.takers
        clusters = range(seat.num_clusters)
        return ExchangeRound(
            [tensors if gives and m in self.takers else [] for m in clusters],
            [tensors if takes and m == self.giver else [] for m in clusters],
            "handed over",
        )

    def _code_again(self, channel: FragmentChannel, attempt: Attempt) -> None:
        """Make the channel's state what the exchange would have left, but for the mean's hash."""
        buffers = attempt.buffers
        channel.before.begin(self.round)
        if buffers.parity.apart:
            channel.parity_check.memory.zero_()
        channel.before.met = self.round
        if not buffers.parity.is_refused:
            channel.before.keep(self.round)
            if not buffers.is_shared:
                buffers.wire.copy_(buffers.sent)
            buffers.parity.square = attempt.own_square()
            channel.recode(buffers.wire, buffers.sent, attempt.launch)


def _told(parity: ParityResult, seat: Seat, remembers: bool) -> Tensor:
    """Return what headers have told as int64 `[6 + C, C]`, by position.

    `remembers`: the next header tells of this round's mean, or a later one's; of shards that are
    others than they were it tells nothing.
    """
    place = {id: position for position, id in enumerate(seat.ids)}
    table = torch.zeros(6 + len(place), max(len(place), 3), dtype=torch.int64)
    named = {
        0: parity.refused_by,
        1: parity.idle_in,
        3: parity.uncommitted,
        4: parity.too_large,
    }
    for row, clusters in named.items():
        table[row, [place[id] for id in clusters]] = 1
    table[2, 0], table[2, 1] = parity.round, parity.is_refused
    table[2, 2] = remembers and not parity.is_refused
    for a, b, kind in parity.apart:
        table[5 + place[a], place[b]] = kind
    squares = {id: bits_of(square) for id, square in parity.squares}
    is_of_all = squares.keys() == place.keys()  # not of other clusters
    table[-1, : len(place)] = torch.tensor([squares[id] if is_of_all else -1 for id in place])
    return table


def _heard(table: Tensor, attempt: Attempt, seat: Seat) -> ParityResult:
    """Return what `_told` was given, as it is here."""
    ids, rows = seat.ids, table.tolist()
    refused_by, idle_in, uncommitted, too_large = (
        [id for id, flag in zip(ids, rows[row], strict=False) if flag] for row in (0, 1, 3, 4)
    )
    apart = [
        [ids[a], ids[b], kind]
        for a, row in enumerate(rows[5:-1])
        for b, kind in enumerate(row)
        if kind
    ]
    pairs = {(a, b) for a, b, _ in apart}
    return ParityResult(
        refused_by,
        Sides.of(ids, pairs, refused_by).wrong,
        rows[2][0],
        bool(rows[2][1]),
        idle_in,
        attempt.is_idle,
        apart,
        attempt.anchor_hash(),
        squares=[[id, of_bits(bits)] for id, bits in zip(ids, rows[-1], strict=False)],
        uncommitted=uncommitted,
        too_large=too_large,
        ids=[*ids],
    )
