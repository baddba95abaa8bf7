"""The transport over TCP: gloo groups of each fragment, outside every torch.distributed world.

Groups are built by hand (`ProcessGroupGloo` over the rendezvous store) and never registered with
torch, so no collective of the inner engine can cross a cluster. Each fragment has its own groups
and its own thread: gloo matches operations on one group silently by their order, and so a
fragment's transfers stay one FIFO while different fragments overlap. A group is one connection to
each peer; with `link.streams` a fragment has several, and each message is cut over them
(multistream.py). A rank then holds fragments x streams x peers connections.

A round of an exchange is point-to-point sends and receives with every peer, receives first. gloo
tells the peer of a receive on the connection that its own data take, and sends only what the peer
has asked for, so a round takes two one-way latencies. Its all_gather, which posts sends first, lets
a rank that comes second send half its data ahead of its requests while the other direction idles,
and so takes 3/2 of the time (payload at 61 to 64 % of a tbf line of 2 or 20 Mbit/s with one rank
50 ms late; these rounds 93 to 95 %, TCP's ceiling 95.6).
Every wait has the transport's deadline; a peer that closes its connection or misses it becomes
`PeerLost`, which names the first one lost (farewell.py). Before each transfer the clusters tell
each other what it is (handshake.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.comm.coalescing import Incoming, outgoing
from dsx.comm.farewell import Farewells
from dsx.comm.gather import Gathers
from dsx.comm.handshake import LaunchHandshake
from dsx.comm.point_to_point import PointToPoint
from dsx.comm.sockets import opened_here
from dsx.comm.spread import Spread, Way
from dsx.core.at_exit import close_at_exit, has_closed
from dsx.core.cores import seconds_waited
from dsx.core.exchange import COMMIT, HEADER, Exchange, ExchangeRound, next_round
from dsx.core.fifo import SLACK_SECONDS, Fifo
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost, Pending, Submission
from dsx.core.types import Stage

_WHOLE = Stage()
_END_SECONDS = 1.0  # in which transfers under way may end when a transport is closed
logger = logging.getLogger(__name__)


class GlooPending(Pending):
    """An exchange running on its fragment's thread."""

    def __init__(self, fifo: Fifo, label: str, deadline_seconds: float) -> None:
        self.future: Future[Tensor] = Future()
        self._fifo = fifo
        self.label = label
        self._deadline_seconds = deadline_seconds
        self.told: dict[int, bytes] = {}  # what `notes` shows, while it is filled
        self.notes: Mapping[int, bytes] = MappingProxyType(self.told)

    def wait(self) -> Tensor:
        """Return the mean; the thread behind it keeps the deadline."""
        return self._fifo.result(self.future, self.label, self._deadline_seconds)

    def wait_unless(self, event: Future[Any]) -> bool:
        """Block until the exchange has ended or failed, or `event` is done; whether it has."""
        self._fifo.wait(self.future, self.label, self._deadline_seconds, event)
        return self.future.done()

    @property
    def has_arrived(self) -> bool:
        """Whether the thread has ended the exchange without an error."""
        return self.future.done() and self.future.exception() is None


class FragmentGroups:
    """One fragment's connections to its peers: one of each group to every other cluster."""

    def __init__(
        self,
        groups: Sequence[Any],
        seat: Seat,
        deadline: float,
        farewells: Farewells | None = None,
    ) -> None:
        self._groups = groups
        self._seat = seat
        self._farewells = farewells
        self._deadline_seconds = deadline

    def run(self, round: ExchangeRound, label: str) -> int:
        """Send and receive what `round` says; return the payload bytes sent."""
        messages = PointToPoint(
            self._groups, self._seat, label, self._deadline_seconds, farewells=self._farewells
        )
        arriving = {peer: Incoming(round.incoming[peer]) for peer in self._seat.others}
        for peer, incoming in arriving.items():
            for message in incoming.messages:
                messages.receive(message, peer)
        made: dict[int, list[Tensor]] = {}  # one that goes to all is put together once
        for peer in self._seat.others:
            tensors = round.outgoing[peer]
            if id(tensors) not in made:
                made[id(tensors)] = outgoing(tensors)
            for message in made[id(tensors)]:
                messages.send(message, peer)
        messages.wait()
        for incoming in arriving.values():
            incoming.deliver()
        return round.bytes_sent(self._seat)

    def spread(self, tensor: Tensor, label: str, way: Way) -> int:
        """Take a tensor from the one before in a chain, and pass it on; return the bytes sent."""
        return Spread(
            self._groups, self._seat, label, self._deadline_seconds, self._farewells, way
        ).run(tensor)


class GlooTransport:
    """Connects this rank to its peers of the same shard coordinate in the other clusters.

    `connect(what, n)` makes n groups of all of them; it is not called where there is no peer.
    `notes` is this cluster's own store, if it has several ranks (farewell.py). `ports` are those
    that gloo listens on, here and at the peers, once `connect` has been called: see sockets.py.
    """

    def __init__(
        self,
        fragments: Sequence[int],
        connect: Callable[[str, int], Sequence[Any]],
        seat: Seat,
        deadline_seconds: float,
        stage: Stage = _WHOLE,
        streams: int = 1,
        notes: dist.Store | None = None,
        ports: Collection[int] = (),
    ) -> None:
        self._stage = stage
        self._deadline_seconds = deadline_seconds
        self.seat, self.fragments = seat, tuple(fragments)
        self._groups: dict[int, FragmentGroups] = {}
        self._fifos: dict[int, Fifo] = {}
        self._under_way: list[GlooPending] = []
        self._is_given_up = False
        is_alone = seat.num_clusters == 1
        with opened_here(ports) as self._sockets:
            group = None if is_alone else connect("launch handshake", 1)[0]
            of_fragments = {
                fragment: [] if is_alone else connect(stage.name_of(fragment), streams)
                for fragment in fragments
            }
        self._farewells = Farewells(group, seat, notes)
        self._handshake = LaunchHandshake(group, seat, deadline_seconds, stage, self._farewells)
        self._gathers = Gathers(group, seat, deadline_seconds, self._farewells)
        self._gather_fifo = Fifo("dsx-gather")
        for fragment, groups in of_fragments.items():
            self._groups[fragment] = FragmentGroups(groups, seat, deadline_seconds, self._farewells)
            self._fifos[fragment] = Fifo(f"dsx-fragment-{fragment}")
        close_at_exit(self)

    def submit(
        self, what: Submission, exchange: Exchange, again: Callable[[], Exchange] | None = None
    ) -> GlooPending:
        """Run the exchange on the fragment's thread and return at once; once, as members stay."""
        group = self._groups[what.fragment]
        fifo, label = self._fifos[what.fragment], what.on(self._stage)
        pending = GlooPending(fifo, label, self._deadline_seconds)
        self._under_way = [p for p in self._under_way if not p.future.done()] + [pending]
        number = self._handshake.take_number(what)

        def shake_hands(header: ExchangeRound | None) -> int:
            return self._handshake.agree(what, number, header, pending.told)

        def run() -> Tensor:
            return _drive(group, label, exchange, pending, shake_hands, fifo.give_sign)

        fifo.submit(pending.future, run)
        return pending

    @property
    def farewells(self) -> Farewells:
        """What peers say in leaving."""
        return self._farewells

    def spread(
        self,
        fragment: int,
        tensor: Tensor,
        chain: Sequence[int],
        moved: Callable[[int], None],
        index: int = -1,
    ) -> int:
        """Overwrite `tensor` in place with that of the chain's first; return the bytes sent."""
        if len(chain) < 2 or self.seat.position not in chain or not tensor.numel():
            return 0
        label = f"{self._stage.name_of(fragment)} of cluster {self.seat.ids[chain[0]]}"
        group, passed, sent = self._groups[fragment], Future[Tensor](), [0]
        fifo = self._fifos[fragment]
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # another thread reads it

        def tell(num_bytes: int) -> None:
            fifo.give_sign()
            moved(num_bytes)

        def run() -> Tensor:  # in turn with the fragment's transfers
            sent[0] = group.spread(tensor, label, Way(chain, tell))
            return tensor

        fifo.submit(passed, run)
        fifo.result(passed, label, self._deadline_seconds)  # kept by each piece
        return sent[0]

    def gather(self, what: str, value: Any) -> Callable[[], Sequence[Any]]:
        """Tell the peers a value, on a thread of its own; what is returned waits for theirs."""
        future: Future[list[Any]] = Future()
        self._gather_fifo.submit(future, lambda: self._gathers.exchange(what, value))
        return lambda: self._gather_fifo.result(future, what, self._deadline_seconds)

    def offer(self, shared: Callable[[int], Sequence[Tensor]]) -> None:
        """Nothing to do: every cluster is waited for."""

    def follow_views(self, reopen: Callable[[Seat, int | None], object]) -> None:
        """Nothing to do: the membership stays."""

    @property
    def last_sign(self) -> float:
        """When a thread of its transfers has given its last sign of life."""
        return max((fifo.last_sign for fifo in self._fifos.values()), default=0.0)

    def abort(self) -> None:
        """Give up what is under way; afterwards no exchange goes on, and no buffer is written.

        Waits for what is computed between two messages. PeerLost if a thread does not come back.
        """
        self._is_given_up = True
        self._farewells.close()
        self._drop_connections()
        self.close()
        for fifo in self._fifos.values():
            if not fifo.join(self._deadline_seconds + SLACK_SECONDS):
                raise PeerLost("a thread of the membership before does not end; resume the run")

    def close(self) -> None:
        """Let running exchanges end, if they do so within a second, and drop the connections.

        What is given up is logged; its peers find the connection closed.
        """
        has_closed(self)
        fifos = [*self._fifos.values(), self._gather_fifo]
        for fifo in fifos:
            fifo.end_soon()
        until = time.monotonic() + _END_SECONDS
        have_ended = [fifo.join(max(until - time.monotonic(), 0.0)) for fifo in fifos]
        self._farewells.close()
        if not all(have_ended) and not self._is_given_up:
            given_up = [p.label for p in self._under_way if not p.future.done()]
            logger.warning("closed, giving up what was under way: %s", "; ".join(given_up) or "-")
            self._drop_connections()
            for fifo in fifos:
                fifo.join(max(until + _END_SECONDS - time.monotonic(), 0.0))
        self._sockets.forget()
        self._groups.clear()
        self._handshake.close()
        self._gathers.close()

    def _drop_connections(self) -> None:
        """End them at once: whoever waits on one, here or at a peer, gets an error."""
        self._sockets.shut_down()


def _drive(
    group: FragmentGroups,
    label: str,
    exchange: Exchange,
    pending: GlooPending,
    shake_hands: Callable[[ExchangeRound | None], int],
    give_sign: Callable[[], None],
) -> Tensor:
    """Run one exchange to its end: the launch handshake, then each round that it yields."""
    started, waited = time.perf_counter(), seconds_waited()
    round, mean = next_round(exchange)
    give_sign()
    header = round if round is not None and round.what == HEADER else None
    since = time.perf_counter()
    pending.bytes_sent += shake_hands(header)
    meeting_seconds = time.perf_counter() - since
    if header is not None:
        round, mean = next_round(exchange)
    give_sign()
    message_seconds = 0.0
    while round is not None:
        since = time.perf_counter()
        pending.bytes_sent += group.run(round, label)
        message_seconds += (taken := time.perf_counter() - since)
        if round.what == COMMIT:
            pending.commit_seconds += taken
        give_sign()
        round, mean = next_round(exchange)
        give_sign()
    assert mean is not None
    pending.seconds = time.perf_counter() - started - meeting_seconds
    pending.turn_seconds = seconds_waited() - waited
    pending.coding_seconds = pending.seconds - message_seconds - pending.turn_seconds
    return mean
