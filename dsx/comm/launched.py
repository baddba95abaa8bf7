"""A launch under way, from its first attempt to its commit, whatever memberships come between."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from dsx.core.exchange import COMMIT, Exchange, ExchangeRound, next_round
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost, Pending, Submission
from dsx.core.waits import waiting_for


class Launched(Pending):
    """A submission that outlives the connections it was made over; `wait` returns at its commit.

    Its attempt is stopped where it is when the membership changes. If that is the last message, the
    result is here, and holds if another member has had everybody's word: `commit`. Otherwise it is
    `given_up`, and made anew.
    """

    def __init__(
        self,
        what: Submission,
        again: Callable[[], Exchange],
        result: Callable[[Launched], Tensor],
        may_begin: Callable[[Launched], bool],
    ) -> None:
        """`result` waits; `may_begin`: whether those before it have ended, whose state it needs."""
        self.what, self.again = what, again
        self.future: Future[Tensor] = Future()
        self.inner: Pending | None = None  # of the attempt under way
        self.error: PeerLost | None = None  # of the last attempt, if it was lost
        self._result, self._may_begin = result, may_begin
        self._exchange: Exchange | None = None
        self._at: ExchangeRound | None = None
        self._seat: Seat | None = None

    def wait(self) -> Tensor:
        """Return the mean, once it is committed."""
        return self._result(self)

    def wait_unless(self, event: Future[Any]) -> bool:
        """Block until it has ended or failed, or `event` is done; whether it has."""
        with waiting_for(f"{self.what}", None):
            futures.wait([self.future, event], None, futures.FIRST_COMPLETED)
        return self.future.done()

    @property
    def has_arrived(self) -> bool:
        """Whether it is committed."""
        return self.future.done() and self.future.exception() is None

    def attempt(
        self, exchange: Exchange, seat: Seat, prepare: Callable[[], object] = lambda: None
    ) -> Exchange:
        """Return an exchange to be run among the members of `seat`, which can be stopped.

        `prepare` is called on the transfer's thread, when those before it have ended.
        """
        self._exchange, self._seat, self._at, self.error = exchange, seat, None, None
        return self._followed(exchange, prepare)

    def commit(self) -> bool:
        """End an attempt whose own part is done, as others have ended it; False if it is not.

        They have had this cluster's word that it holds what they do, so it does.
        """
        round, exchange, seat = self._at, self._exchange, self._seat
        if round is None or round.what != COMMIT or exchange is None or seat is None:
            return False
        for peer in seat.others:
            (own,), (theirs,) = round.outgoing[peer], round.incoming[peer]
            theirs.copy_(own)
        following, mean = next_round(exchange)
        assert following is None and mean is not None, "the last message was not the last"
        self.end(mean)
        return True

    def end(self, mean: Tensor) -> None:
        """Hand the mean to whoever waits."""
        assert self.inner is not None
        self.bytes_sent, self.notes = self.inner.bytes_sent, self.inner.notes
        self.seconds, self.coding_seconds = self.inner.seconds, self.inner.coding_seconds
        self.commit_seconds, self.turn_seconds = self.inner.commit_seconds, self.inner.turn_seconds
        self.future.set_result(mean)

    def fail(self, error: Exception) -> None:
        """Hand an error to whoever waits."""
        if not self.future.done():
            self.future.set_exception(error)

    def give_up(self) -> None:
        """End an attempt that has not been committed, and will not be."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._at = self.inner = None

    def _followed(
        self, exchange: Exchange, prepare: Callable[[], object]
    ) -> Generator[ExchangeRound, None, Tensor]:
        if not self._may_begin(self):
            raise PeerLost(f"{self.what}: one before it has been lost")
        prepare()
        while True:
            round, mean = next_round(exchange)
            self._at = round
            if round is None:
                assert mean is not None
                return mean
            yield round
