"""C clusters in one process: the same exchanges, without a network and without threads.

An exchange runs when the last cluster has submitted it. It is the code that runs over a network
too, so a simulated run equals a real one bit for bit. Drive the loops in
two passes, as `step_together` does: all launch, then all apply.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from dsx.core.exchange import HEADER, HEADER_BYTES, Exchange, ExchangeRound, next_round
from dsx.core.membership import Membership, Seat
from dsx.core.transport import PeerLost, Pending, Submission


class InProcessHub:
    """The meeting point of simulated clusters."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self._queues: dict[int, list[deque[InProcessPending]]] = {}
        self._others = [0] * membership.num_clusters  # submitted, beside launches
        self._met: dict[int, set[int]] = {}  # who has submitted which number
        self._announced: dict[int, tuple[int, Submission]] = {}  # by number of the launch
        self._given: dict[int, list[deque[Tensor]]] = {}  # by fragment and taker
        self._gathers: dict[int, dict[int, tuple[str, Any]]] = {}  # by number, then by place
        self._told = [0] * membership.num_clusters
        self.offers: dict[int, Callable[[int], Sequence[Tensor]]] = {}  # by place

    def transports(self) -> list[InProcessTransport]:
        """Return one transport per cluster, in cluster order."""
        return [InProcessTransport(self, Seat(self.membership, id)) for id in self.membership.ids]

    def submit(self, fragment: int, pending: InProcessPending) -> None:
        """Queue one cluster's exchange; run it if it was the last one missing."""
        self._require_same_launch(pending)
        queues = self._queues.setdefault(fragment, [deque() for _ in self.membership.ids])
        queues[pending.seat.position].append(pending)
        while all(queues):
            _run([queue.popleft() for queue in queues])

    def _require_same_launch(self, pending: InProcessPending) -> None:
        """Raise PeerLost unless the n-th launch of one cluster is the n-th of all.

        What is no launch is counted here, apart from launches.
        """
        own, number = pending.seat, 2 * pending.what.number
        if not number:
            self._others[own.position] += 1
            number = 2 * self._others[own.position] - 1
        met = self._met.setdefault(number, set())
        met.add(own.position)
        first, what = self._announced.setdefault(number, (own.cluster_id, pending.what))
        if what != pending.what:
            raise PeerLost(
                f"cluster {first} has {what}, cluster {own.cluster_id} {pending.what}: the "
                "clusters have lost step"
            )
        if len(met) == own.num_clusters:
            del self._announced[number], self._met[number]

    def gather(self, seat: Seat, what: str, value: Any) -> Callable[[], Sequence[Any]]:
        """Keep what one cluster tells; return what gives all values, once all have told theirs."""
        self._told[seat.position] += 1
        told = self._gathers.setdefault(self._told[seat.position], {})
        told[seat.position] = what, json.loads(json.dumps(value))
        if len(told) == seat.num_clusters:
            del self._gathers[self._told[seat.position]]

        def wait() -> Sequence[Any]:
            for place, id in enumerate(seat.ids):
                if place not in told:
                    raise PeerLost(f"{what}: cluster {id} of this process has not told its value")
                if told[place][0] != what:
                    raise PeerLost(
                        f"{what}, but cluster {id} is at {told[place][0]}: the clusters have lost "
                        "step; let all of them call the same, in the same order"
                    )
            return [told[place][1] for place in range(seat.num_clusters)]

        return wait

    def spread(
        self, seat: Seat, fragment: int, tensor: Tensor, chain: Sequence[int], index: int
    ) -> None:
        """Copy the tensor of the chain's first into the others'.

        One that is offered is read where it lies: while clusters take turns at one transfer, a
        giver's fragment stays as it is. Else the first stores its own, and comes first.
        """
        giver = chain[0]
        if index >= 0:
            if seat.position != giver:
                tensor.copy_(self.offers[giver](fragment)[index])
            return
        waiting = self._given.setdefault(fragment, [deque() for _ in seat.ids])
        if seat.position == giver:
            copy = tensor.clone()
            for taker in chain[1:]:
                waiting[taker].append(copy)
        elif not waiting[seat.position]:
            raise PeerLost(
                f"cluster {seat.ids[giver]} has not given fragment {fragment} yet: it comes first"
            )
        else:
            tensor.copy_(waiting[seat.position].popleft())


class InProcessPending(Pending):
    """One cluster's side of an exchange."""

    def __init__(self, seat: Seat, what: Submission, exchange: Exchange) -> None:
        self.seat = seat
        self.what = what
        self.exchange = exchange
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the mean; PeerLost at once if some cluster has not submitted its part."""
        if self.result is None:
            raise PeerLost(f"{self.what}: not every simulated cluster has launched it")
        return self.result

    @property
    def has_arrived(self) -> bool:
        """Whether all clusters have submitted their parts."""
        return self.result is not None


class InProcessTransport:
    """One simulated cluster's transport."""

    def __init__(self, hub: InProcessHub, seat: Seat) -> None:
        self._hub = hub
        self.seat = seat

    @property
    def farewells(self) -> None:
        """Nobody leaves a process alone."""

    def submit(
        self, what: Submission, exchange: Exchange, again: Callable[[], Exchange] | None = None
    ) -> InProcessPending:
        """Queue the exchange and return at once."""
        pending = InProcessPending(self.seat, what, exchange)
        self._hub.submit(what.fragment, pending)
        return pending

    def spread(
        self,
        fragment: int,
        tensor: Tensor,
        chain: Sequence[int],
        moved: Callable[[int], None],
        index: int = -1,
    ) -> int:
        """Take the tensor of the chain's first, in place; return what a line would carry."""
        if self.seat.position not in chain:
            return 0
        self._hub.spread(self.seat, fragment, tensor, chain, index)
        num_bytes = tensor.numel() * tensor.element_size()
        moved(num_bytes)
        return num_bytes if self.seat.position != chain[-1] else 0

    def gather(self, what: str, value: Any) -> Callable[[], Sequence[Any]]:
        """Tell a value; what is returned gives everybody's."""
        return self._hub.gather(self.seat, what, value)

    def offer(self, shared: Callable[[int], Sequence[Tensor]]) -> None:
        """Tell what a fragment's outer state is."""
        self._hub.offers[self.seat.position] = shared

    def follow_views(self, reopen: Callable[[Seat, int | None], object]) -> None:
        """Nothing to do: the membership stays."""

    def close(self) -> None:
        """Nothing to release."""


class TwoPass(Protocol):
    """The loop's two verbs at a step boundary."""

    def launch_due(self, is_skipped: bool = False) -> None:
        """Advance the clock and launch; whether the inner step was skipped."""
        ...

    def apply_ripe(self) -> bool:
        """Apply what is ripe."""
        ...


class Starting(Protocol):
    """The loop's verb before training."""

    def starting(self) -> Iterator[None]:
        """Start, by turns."""
        ...


def step_together(loops: Sequence[TwoPass], skipped: Collection[int] = ()) -> None:
    """Pass one step boundary of all clusters: every launch before any apply.

    `skipped` are the places of those whose optimizer did not step.
    """
    for place, loop in enumerate(loops):
        loop.launch_due(place in skipped)
    for loop in loops:
        loop.apply_ripe()


def start_together(loops: Sequence[Starting]) -> None:
    """Start all clusters' loops, before training: each tells what it holds before any takes it."""
    for _ in zip(*(loop.starting() for loop in loops), strict=True):
        pass


def _run(group: list[InProcessPending]) -> None:
    """Drive the exchanges of all clusters in lockstep to their ends."""
    num_clusters = len(group)
    notes = {pending.seat.cluster_id: pending.what.notes for pending in group if pending.what.notes}
    for pending in group:
        pending.bytes_sent += (HEADER_BYTES + len(pending.what.notes)) * (num_clusters - 1)
        pending.notes = notes
    for number in itertools.count():
        rounds: list[ExchangeRound | None] = []
        for pending in group:
            round, pending.result = next_round(pending.exchange)
            rounds.append(round)
        if None in rounds:
            assert rounds.count(None) == num_clusters, (
                "clusters disagree about an exchange's rounds"
            )
            return
        pass_round(group, rounds, is_first=number == 0)


def pass_round(
    group: Sequence[InProcessPending], rounds: Sequence[ExchangeRound | None], is_first: bool
) -> None:
    """Hand each cluster what the others send it in a round, None where one has ended.

    A header in the first one is counted by whoever starts the exchange.
    """
    for receiver, theirs in enumerate(rounds):
        for sender, round in enumerate(rounds):
            if sender != receiver and round is not None and theirs is not None:
                pairs = zip(round.outgoing[receiver], theirs.incoming[sender], strict=True)
                for sent, received in pairs:
                    received.copy_(sent)
    for pending, round in zip(group, rounds, strict=True):
        if round is not None and not (is_first and round.what == HEADER):
            pending.bytes_sent += round.bytes_sent(pending.seat)
