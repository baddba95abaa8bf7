"""Clusters of one process that meet over gloo: exchanges run on threads, and can be held there."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dsx.comm.gloo import GlooPending, GlooTransport
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.core.exchange import Exchange, ExchangeRound
from dsx.core.membership import Membership, Seat
from dsx.core.transport import TRAINING, Submission

AT_THE_END = -1
FRAGMENTS = 2


class HeldTransport(GlooTransport):
    """Stops its exchanges after so many rounds, or when the mean is there and nobody knows."""

    def __init__(self, store: dist.Store, seat: Seat, deadline_seconds: float) -> None:
        device = open_device("lo")

        def connect(what: str, count: int) -> list[Any]:
            named = dist.PrefixStore(what, store)
            return connect_gloo(named, seat, timedelta(seconds=20), device, count)

        super().__init__(range(FRAGMENTS), connect, seat, deadline_seconds)
        self.hold_after: int | None = None
        self.is_held = Event()
        self.goes_on = Event()

    def submit(self, what: Submission, exchange: Exchange, again: Any = None) -> GlooPending:
        """As over gloo; a launch is held."""
        if what.purpose == TRAINING:
            exchange = self._held(exchange)
        return super().submit(what, exchange)

    def _held(self, exchange: Exchange) -> Generator[ExchangeRound, None, Tensor]:
        rounds = 0
        while True:
            try:
                round = next(exchange)
            except StopIteration as end:
                if self.hold_after == AT_THE_END:
                    self._hold()
                return end.value
            yield round
            rounds += 1
            if rounds == self.hold_after:
                self._hold()

    def _hold(self) -> None:
        self.is_held.set()
        assert self.goes_on.wait(60)


class GlooHub:
    """Takes the place of the in-process one."""

    deadline_seconds = 30.0

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._store = dist.HashStore()

    def transports(self) -> list[HeldTransport]:
        """Connect all, each on a thread of its own, as they wait for each other."""
        seats = [Seat(self._membership, id) for id in self._membership.ids]
        with ThreadPoolExecutor(len(seats)) as threads:
            made = [
                threads.submit(HeldTransport, self._store, seat, self.deadline_seconds)
                for seat in seats
            ]
            return [one.result() for one in made]
