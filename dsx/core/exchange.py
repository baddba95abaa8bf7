"""The one thing that all averaging is made of: every cluster sends every other one some bytes.

An exchange is a generator. It yields `ExchangeRound`s and goes on when their incoming tensors are
filled; its return value is the mean. It never sees a process group, so the same code, and with it
the same bits, runs over a network and with C clusters in one process.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dsx.core.cores import Turn
from dsx.core.membership import Seat

if TYPE_CHECKING:  # what only plans is started without torch
    from torch import Tensor

_Result = TypeVar("_Result")
Exchange = Generator["ExchangeRound", None, "Tensor"]
HEADER_BYTES = 48  # launch handshake and parity header, int64s, once per exchange and peer
COMMIT_BYTES = 8  # of one attempt, to each peer
HASHED_PAIRS = 1 << 16  # of elements, hashed at a time: with weights they stay in a core's cache
HASHED_ON_ACCELERATOR = 64  # times as many at a time there: 32 MiB start few kernels
HEADER = "header"  # `ExchangeRound.what` of three int64 to all, which travel in the handshake
COMMIT = "commit"  # of one int64 to all, behind which what all hold is applied


@dataclass(frozen=True)
class ExchangeRound:
    """Tensors to send to, and to fill from, each cluster; contiguous, of any type, may be empty.

    Clusters are counted by position in the membership: `outgoing[m]` of one has the sizes of
    `incoming[n]` of m, where n is the sender. The places of the own cluster are ignored. `what` is
    for traces, but for `HEADER`: if an exchange begins with one, it costs no message of its own.
    """

    outgoing: Sequence[Sequence[Tensor]]
    incoming: Sequence[Sequence[Tensor]]
    what: str = "codes"

    def bytes_sent(self, seat: Seat) -> int:
        """Return the payload this cluster sends."""
        tensors = [t for m in seat.others for t in self.outgoing[m]]
        return sum(t.numel() * t.element_size() for t in tensors)


def to_all(
    own: Sequence[Tensor], incoming: Sequence[Sequence[Tensor]], what: str = "codes"
) -> ExchangeRound:
    """Send the same tensors to every cluster, and receive theirs."""
    return ExchangeRound([own] * len(incoming), incoming, what)


def together(
    *exchanges: Generator[ExchangeRound, None, Any],
) -> Generator[ExchangeRound, None, list[Any]]:
    """Run exchanges side by side, their messages in one round each time; return their results."""
    results: list[Any] = [None] * len(exchanges)
    running: dict[int, ExchangeRound] = {}
    for index, exchange in enumerate(exchanges):
        _advance(exchange, index, running, results)
    while running:
        rounds = list(running.values())
        clusters = range(len(rounds[0].outgoing))
        yield ExchangeRound(
            [[t for round in rounds for t in round.outgoing[m]] for m in clusters],
            [[t for round in rounds for t in round.incoming[m]] for m in clusters],
        )
        for index in list(running):
            _advance(exchanges[index], index, running, results)
    return results


def _advance(
    exchange: Generator[ExchangeRound, None, Any],
    index: int,
    running: dict[int, ExchangeRound],
    results: list[Any],
) -> None:
    """Take one exchange to its next round, or to its end."""
    round, results[index] = next_round(exchange)
    if round is None:
        running.pop(index, None)
    else:
        running[index] = round


def in_turn(
    exchange: Generator[ExchangeRound, None, _Result], turn: Turn
) -> Generator[ExchangeRound, None, _Result]:
    """Run an exchange that holds a turn whenever it does not wait."""
    while True:
        with turn():
            round, result = next_round(exchange)
        if round is None:
            return cast("_Result", result)
        yield round


def next_round(
    exchange: Generator[ExchangeRound, None, _Result],
) -> tuple[ExchangeRound | None, _Result | None]:
    """Return an exchange's next round, or at its end what it returns."""
    try:
        return next(exchange), None
    except StopIteration as stop:
        return None, stop.value
