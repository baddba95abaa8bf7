"""How a cluster ends in the middle of a launch, as a kill does."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dsx.comm.gloo import GlooPending
from dsx.comm.links.transport import LinkTransport
from dsx.core.exchange import COMMIT, Exchange, ExchangeRound
from dsx.core.membership import Seat
from dsx.core.transport import TRAINING, PeerLost, Submission
from dsx.core.types import Stage

if TYPE_CHECKING:
    from tests.comm.links.sites import Site

Fate = Callable[[Submission], int | None]  # after how many rounds of it a cluster ends
NEVER: Fate = lambda what: None  # noqa: E731
BUT_ONE = -1  # at the commit, having told it to the first of the others alone


class Doomed(LinkTransport):
    """Ends its link in the middle of an exchange, if that is its fate.

    All launches before that one are committed by then, so what it has a part in is the same in
    every run, however slow.
    """

    def __init__(
        self, site: Site, seat: Seat, part: str, fate: Fate, fragments: Sequence[int]
    ) -> None:
        self._site, self._fate = site, fate
        name = f"a run/view {seat.membership.epoch}{part}"
        super().__init__(site.link, name, fragments, seat, 20.0, Stage())

    def submit(self, what: Submission, exchange: Exchange, again: Any = None) -> GlooPending:
        rounds = self._fate(what) if what.purpose == TRAINING else None
        return super().submit(
            what, exchange if rounds is None else self._cut(exchange, rounds, what)
        )

    def _cut(
        self, exchange: Exchange, rounds: int, what: Submission
    ) -> Generator[ExchangeRound, None, Tensor]:
        for number, round in enumerate(exchange):
            if round.what == COMMIT and rounds == BUT_ONE:
                told = [sent if m == self.seat.others[0] else () for m, sent in
                        enumerate(round.outgoing)]  # fmt: skip
                yield ExchangeRound(told, round.incoming, COMMIT)
                number = rounds = 0
            if number == rounds:
                self._site.cut_at = min(self._site.cut_at, what.step)
                self._site.await_commits(what.number)
                time.sleep(0.2)  # what was sent before arrives
                self._site.end()
                raise PeerLost("this site has been killed")
            yield round
        raise AssertionError("its fate was not reached")
