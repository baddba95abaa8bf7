"""Another cluster's messages, recorded, so that one cluster's coding can be measured by itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsx.compress.base import Channel, Launch
from dsx.core.cores import Turn
from dsx.core.exchange import Exchange, ExchangeRound, in_turn, next_round

Messages = Sequence[Sequence[Tensor]]  # of one transfer, round by round


def record(own: Channel, theirs: Channel, xs: Sequence[Tensor], launch: Launch) -> Messages:
    """Exchange `xs` between two clusters, in place; return what the second sends the first."""
    exchanges = [c.exchange(x, launch) for c, x in zip((own, theirs), xs, strict=True)]
    rounds, found = _next(exchanges), list[list[Tensor]]()
    while rounds:
        for sender, receiver in ((0, 1), (1, 0)):
            sent, place = rounds[sender].outgoing[receiver], rounds[receiver].incoming[sender]
            for message, into in zip(sent, place, strict=True):
                into.copy_(message)
        found.append([tensor.clone() for tensor in rounds[0].incoming[1]])
        rounds = _next(exchanges)
    return found


def _next(exchanges: Sequence[Exchange]) -> list[ExchangeRound]:
    rounds = [next_round(exchange)[0] for exchange in exchanges]
    found = [round for round in rounds if round is not None]
    assert len(found) in (0, len(exchanges)), "one cluster has more rounds than the other"
    return found


def replay(channel: Channel, x: Tensor, launch: Launch, messages: Messages, turn: Turn) -> None:
    """Average `x`, in place, with what was recorded; a turn is held but for its messages."""
    exchange, left = in_turn(channel.exchange(x, launch), turn), iter(messages)
    while (round := next_round(exchange)[0]) is not None:
        for into, message in zip(round.incoming[1], next(left), strict=True):
            into.copy_(message)
