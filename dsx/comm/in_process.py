"""C clusters in one process: the same exchanges, without a network and without threads.

An exchange runs when the last cluster has submitted it. It is the code that runs over a network
too, so a simulated run equals a real one bit for bit. Drive the loops in
two passes, as `step_together` does: all launch, then all apply.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dsx.core.exchange import HEADER, HEADER_BYTES, Exchange, ExchangeRound, Peers
from dsx.core.transport import PeerLost, Submission


class InProcessHub:
    """The meeting point of `num_clusters` simulated clusters."""

    def __init__(self, num_clusters: int) -> None:
        if num_clusters < 1:
            raise ValueError(f"num_clusters={num_clusters} must be at least 1")
        self.num_clusters = num_clusters
        self._queues: dict[int, list[deque[InProcessPending]]] = {}
        self._launches = [0] * num_clusters
        self._announced: dict[int, tuple[int, Submission]] = {}  # by number of the launch
        self._broadcasts: dict[int, list[deque[Tensor]]] = {}  # by fragment and receiver

    def transports(self) -> list[InProcessTransport]:
        """Return one transport per cluster, in cluster order."""
        return [InProcessTransport(self, cluster_id) for cluster_id in range(self.num_clusters)]

    def submit(self, fragment: int, pending: InProcessPending) -> None:
        """Queue one cluster's exchange; run it if it was the last one missing."""
        self._require_same_launch(pending)
        queues = self._queues.setdefault(fragment, [deque() for _ in range(self.num_clusters)])
        queues[pending.cluster_id].append(pending)
        while all(queues):
            _run([queue.popleft() for queue in queues])

    def _require_same_launch(self, pending: InProcessPending) -> None:
        """Raise PeerLost unless the n-th launch of one cluster is the n-th of all."""
        self._launches[pending.cluster_id] += 1
        number = self._launches[pending.cluster_id]
        first, what = self._announced.setdefault(number, (pending.cluster_id, pending.what))
        if what != pending.what:
            raise PeerLost(
                f"cluster {first} has {what}, cluster {pending.cluster_id} {pending.what}: the "
                "clusters have lost step"
            )
        if min(self._launches) >= number:
            del self._announced[number]

    def broadcast(self, cluster_id: int, fragment: int, tensor: Tensor) -> None:
        """Store cluster 0's tensor, copy it into the others'; cluster 0 has to come first."""
        waiting = self._broadcasts.setdefault(fragment, [deque() for _ in range(self.num_clusters)])
        if cluster_id == 0:
            copy = tensor.clone()
            for queue in waiting[1:]:
                queue.append(copy)
        elif not waiting[cluster_id]:
            raise PeerLost(f"cluster 0 has not broadcast fragment {fragment}: start it first")
        else:
            tensor.copy_(waiting[cluster_id].popleft())


class InProcessPending:
    """One cluster's side of an exchange."""

    def __init__(self, cluster_id: int, what: Submission, exchange: Exchange) -> None:
        self.cluster_id = cluster_id
        self.what = what
        self.exchange = exchange
        self.bytes_sent = 0
        self.seconds = 0.0
        self.coding_seconds = 0.0
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the mean; PeerLost at once if some cluster has not submitted its part."""
        if self.result is None:
            raise PeerLost(f"{self.what}: not every simulated cluster has launched it")
        return self.result


class InProcessTransport:
    """One simulated cluster's transport."""

    def __init__(self, hub: InProcessHub, cluster_id: int) -> None:
        self._hub = hub
        self.cluster_id = cluster_id
        self.num_clusters = hub.num_clusters

    def submit(self, what: Submission, exchange: Exchange) -> InProcessPending:
        """Queue the exchange and return at once."""
        pending = InProcessPending(self.cluster_id, what, exchange)
        self._hub.submit(what.fragment, pending)
        return pending

    def broadcast(self, fragment: int, tensor: Tensor) -> None:
        """Overwrite `tensor` in place with cluster 0's."""
        self._hub.broadcast(self.cluster_id, fragment, tensor)

    def close(self) -> None:
        """Nothing to release."""


class TwoPass(Protocol):
    """The loop's two verbs at a step boundary."""

    def launch_due(self) -> None:
        """Advance the clock and launch."""
        ...

    def apply_ripe(self) -> bool:
        """Apply what is ripe."""
        ...


def step_together(loops: Sequence[TwoPass]) -> None:
    """Pass one step boundary of all clusters: every launch before any apply."""
    for loop in loops:
        loop.launch_due()
    for loop in loops:
        loop.apply_ripe()


def _run(group: list[InProcessPending]) -> None:
    """Drive the exchanges of all clusters in lockstep to their ends."""
    num_clusters = len(group)
    for pending in group:
        pending.bytes_sent += HEADER_BYTES * (num_clusters - 1)
    for number in itertools.count():
        rounds = [_next_round(pending) for pending in group]
        if None in rounds:
            assert rounds.count(None) == num_clusters, (
                "clusters disagree about an exchange's rounds"
            )
            return
        for receiver, theirs in enumerate(rounds):
            for sender, round in enumerate(rounds):
                if sender != receiver and round is not None and theirs is not None:
                    pairs = zip(round.outgoing[receiver], theirs.incoming[sender], strict=True)
                    for sent, received in pairs:
                        received.copy_(sent)
        for pending, round in zip(group, rounds, strict=True):
            if round is not None and not (number == 0 and round.what == HEADER):
                pending.bytes_sent += round.bytes_sent(Peers(pending.cluster_id, num_clusters))


def _next_round(pending: InProcessPending) -> ExchangeRound | None:
    """Take one cluster's exchange to its next round; None at its end."""
    try:
        return next(pending.exchange)
    except StopIteration as stop:
        pending.result = stop.value
        return None
