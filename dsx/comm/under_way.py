"""Launches under way on one rank: among whom each is averaged, and when its attempts may begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from dsx.comm.launched import Launched
from dsx.comm.spans import Span, at
from dsx.core.exchange import Exchange, ExchangeRound
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost, PeerPreempted


class UnderWay:
    """Of one transport, with its lock; `lost` is told of an attempt that a peer's end has ended."""

    def __init__(self, span: Span, lost: Callable[[PeerLost], object]) -> None:
        self.lock = threading.RLock()
        self.spans = [span]
        self.launches: dict[int, Launched] = {}  # by number, in order
        self.committed: dict[int, int] = {}  # by fragment, the last launch
        self.last = 0  # launch that was submitted
        self.told_last: int | None = None  # while members agree: later launches wait for it
        self.era: object | None = object()  # of the members; None while all is given up
        self.reopen: list[Callable[[Seat, int | None], object]] = []
        self.sign = time.monotonic()  # when anything has last moved
        self._lost = lost

    @property
    def is_known(self) -> bool:
        """Whether it is known among whom the last launch is averaged."""
        is_told = self.told_last is None or self.last <= self.told_last
        return self.era is not None and is_told

    def add(self, launched: Launched, exchange: Exchange) -> None:
        """Take one more launch, and start an attempt if that may begin."""
        number = launched.what.number
        self.launches[number] = launched
        self.last = max(self.last, number)
        if self._may_start(launched):
            self._start(launched, exchange)

    def start_due(self) -> None:
        """Start what has waited for the members, or for an earlier span."""
        for launched in [*self.launches.values()]:
            if self._may_start(launched):
                self._start(launched, launched.again())

    def may_begin(self, launched: Launched) -> bool:
        """Whether no launch of the fragment before this one is under way; on its thread."""
        with self.lock:
            return not self._before(launched)

    def own(self) -> list[int]:
        """Return the launches that this cluster has its part in."""
        return [number for number in self.launches if not at(self.spans, number).follows]

    def commit(self, launched: Launched, mean: Tensor | None) -> None:
        """Note a commit; `mean` is None if whoever waits has it."""
        what = launched.what
        self.committed[what.fragment] = max(self.committed.get(what.fragment, 0), what.number)
        self.launches.pop(what.number, None)
        at(self.spans, what.number).begun.add(what.fragment)
        if mean is not None:
            launched.end(mean)

    def fail(self, error: PeerLost) -> None:
        """End all of them."""
        for launched in [*self.launches.values()]:
            lost = launched.error
            launched.fail(error if lost is None or isinstance(error, PeerPreempted) else lost)
        self.launches.clear()

    def prepared(self, span: Span, fragment: int, exchange: Exchange) -> Exchange:
        """Return an exchange of no launch, to be run under its span's membership."""
        return self._after(lambda: self._prepare(span, fragment), exchange)

    def take_what_is_over(self) -> Span | None:
        """Return the first span if all members have left it behind, and forget it."""
        with self.lock:
            if len(self.spans) < 2 or self.last < self.spans[1].first:
                return None
            has_begun = {*self.spans[1].members.fragments} <= self.spans[1].begun
            return self.spans.pop(0) if has_begun else None

    def _before(self, launched: Launched) -> list[int]:
        """Return the earlier launches of its fragment that are under way."""
        what, under_way = launched.what, self.launches.items()
        return [n for n, o in under_way if n < what.number and o.what.fragment == what.fragment]

    def _may_start(self, launched: Launched) -> bool:
        """Whether an attempt may be submitted: it is known among whom, and none of an earlier span
        is ahead of it.
        """
        number = launched.what.number
        span = at(self.spans, number)
        is_later = self.told_last is not None and number > self.told_last
        if launched.inner is not None or is_later or (self.era is None and not span.follows):
            return False
        return all(at(self.spans, n) is span for n in self._before(launched))

    def _start(self, launched: Launched, exchange: Exchange) -> None:
        span, fragment = at(self.spans, launched.what.number), launched.what.fragment
        prepare = partial(self._prepare, span, fragment)
        launched.inner = pending = span.members.submit(
            launched.what, launched.attempt(exchange, span.seat, prepare)
        )
        era = None if span.follows else self.era
        pending.future.add_done_callback(partial(self._ended, launched, era))

    def _prepare(self, span: Span, fragment: int) -> None:
        for reopen in self.reopen if not span.follows else ():
            reopen(span.seat, fragment)

    def _after(
        self, prepare: Callable[[], object], exchange: Exchange
    ) -> Generator[ExchangeRound, None, Tensor]:
        prepare()
        return (yield from exchange)

    def _ended(self, launched: Launched, era: object | None, future: Future[Tensor]) -> None:
        """Take the end of an attempt, on the fragment's thread; `era` is None if it follows."""
        self.sign = time.monotonic()
        with self.lock:
            if era is not None and era is not self.era:
                return  # it is looked at where the members are agreed on
            error = future.exception()
            if error is None:
                self.commit(launched, future.result())
                self.start_due()
            elif era and isinstance(error, PeerLost) and not isinstance(error, PeerPreempted):
                launched.error = error
                self._lost(error)
            else:
                self.launches.pop(launched.what.number, None)
                launched.fail(error if isinstance(error, Exception) else RuntimeError(error))
