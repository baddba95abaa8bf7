"""A rank's link to processes of other clusters: one thread, one port, one libzmq context.

Other threads post messages here and wait for them. Of two ranks one calls the other, at the address
it listens on; messages then go both ways, so a site that can only call out is no different.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import zmq

from dsx.comm.links.messages import Ended
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.pace import Pace
from dsx.comm.links.peer import LinkDown, Peer
from dsx.comm.links.requests import Name, Serve
from dsx.comm.links.sockets import Trust
from dsx.comm.links.switch import Switch

_LOOK_SECONDS = 0.05
_JOIN_SECONDS = 5.0
_LINGER_SECONDS = 1.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkFigures:
    """One rank's link to a process: seconds there and back, 0 before any was seen, and bytes."""

    least_seconds: float
    last_seconds: float
    sent_bytes: int
    received_bytes: int


class Link:
    """The connections of one rank to processes of other clusters; for any thread."""

    def __init__(
        self,
        cluster_id: int,
        rank: int,
        trust: Trust | None,
        options: LinkOptions,
        pace: Pace | None = None,
    ) -> None:
        self.cluster_id, self.rank = cluster_id, rank
        self._switch = Switch((cluster_id, rank), trust, options, pace or Pace(None))
        self.incarnation, self.port = self._switch.incarnation, self._switch.port
        self.held: list[object] = []  # what is to live as long
        self.ways: dict[Name, str] = {}  # where to call those who are called through a relay
        self._posted: deque[Callable[[], object]] = deque()
        self._letting_go: list[tuple[int, Future[None]]] = []  # lanes that have been closed
        self._there = threading.Condition()
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._switch.poller.register(self._woken, zmq.POLLIN)
        self._closing_at: float | None = None
        self._has_ended = False
        self._doing = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="dsx-link", daemon=True)
        self._thread.start()

    def expect(
        self,
        cluster_id: int,
        rank: int,
        address: str | None,
        incarnation: int | None = None,
        slot: int = 0,
    ) -> None:
        """Exchange messages with a process from now on: call it at `host:port`, or wait for it.

        With `incarnation` only the process that was started then is meant. `slot` is its place
        among those that a gateway there hands callers to.
        """
        self._post(lambda: self._switch.expect((cluster_id, rank), address, incarnation, slot))

    def readmit(self) -> None:
        """From now on let a later process of a rank take the place of one that was given up."""
        self._switch.readmits = True

    def hold(self, clusters: Collection[int], epoch: int) -> None:
        """Give up nobody of these clusters, the members of a view, who is lost and may come back.

        Those of others are, from then on. Of an earlier epoch than was told before it is nothing.
        """
        self._switch.held.hold(clusters, epoch)

    def hold_nobody(self) -> None:
        """From now on give up whoever is lost: this cluster does not go on, and waits for none."""
        self._switch.held.end()

    def has_let_go(self, name: Name) -> bool:
        """Whether a process has said that it goes on without this one, for good."""
        peer = self._switch.peers.get(name)
        return peer is not None and peer.has_let_go

    def is_apart(self, name: Name) -> bool:
        """Whether a process is reached that this one has left out, and that goes on as well."""
        peer = self._switch.peers.get(name)
        return peer is not None and peer.is_apart

    def wait_for(self, cluster_id: int, rank: int, seconds: float) -> None:
        """Block until a process is there; LinkDown if it has gone, TimeoutError after `seconds`."""
        until = time.monotonic() + seconds
        with self._there:
            while True:
                peer = self._switch.peers.get((cluster_id, rank))
                if peer is not None and peer.error is not None:
                    raise peer.error
                if peer is not None and peer.is_there:
                    return
                left = until - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    why = f": {peer.trouble}" if peer is not None and peer.trouble else ""
                    raise TimeoutError(f"no link to cluster {cluster_id}, rank {rank}{why}")
                self._there.wait(min(left, 1.0))

    def send(self, to: Name, lane: int, tag: int, data: memoryview) -> Future[None]:
        """Post a message of bytes, which must stay as they are until the future is done."""
        return self._transfer(to, lambda peer, end: peer.mailbox.send(lane, tag, data, end))

    def receive(self, of: Name, lane: int, tag: int, place: memoryview) -> Future[None]:
        """Give the next message with a tag on a lane its place."""
        return self._transfer(of, lambda peer, end: peer.mailbox.receive(lane, tag, place, end))

    def ask(self, whom: Name, body: bytes) -> Future[bytes]:
        """Send a request to whoever serves there; the future has the answer.

        To cancel the future is to give the request up.
        """
        answer: Future[bytes] = Future()

        def post() -> None:
            peer, requests = self._switch.peer(whom), self._switch.requests
            number = requests.ask(peer, body, answer)

            def forget(answer: Future[bytes]) -> None:
                if answer.cancelled():
                    self._post(lambda: requests.forget(peer, number))

            answer.add_done_callback(forget)

        self._post(post)
        return answer

    def serve(self, serve: Serve, first: bytes = b"") -> None:
        """Hand requests of others to `serve`, in the link's thread, with a function to answer.

        Those that begin with the byte `first`; b"": all for which nobody else is there.
        """
        self._post(lambda: self._switch.requests.serve(serve, first))

    def limit(self, mbit: float) -> None:
        """Send no more than that, this rank's share of its cluster's rate."""
        self._switch.pace.limit(mbit)

    @property
    def bytes_per_second(self) -> float | None:
        """What this rank may send now; None for no limit."""
        return self._switch.pace.bytes_per_second

    def soon(self, do: Callable[[], object]) -> None:
        """Have something done in the link's thread: an answer that is given later, say."""
        self._post(do)

    def silent_seconds(self, name: Name) -> float | None:
        """Return for how long nothing has come from a process; None of one that is not there."""
        peer = self._switch.peers.get(name)
        return None if peer is None or not peer.is_met else peer.silent_seconds

    def process_at(self, name: Name) -> int | None:
        """Return the incarnation of a process that has been met and is not lost, else None."""
        peer = self._switch.peers.get(name)
        is_there = peer is not None and peer.is_met and not (peer.error or peer.suspected)
        return peer.incarnation if peer is not None and is_there else None

    def is_lost(self, name: Name) -> bool:
        """Whether a process is not reached, and may come back."""
        peer = self._switch.peers.get(name)
        return peer is not None and peer.error is None and bool(peer.suspected)

    def why_gone(self, name: Name) -> str:
        """Return why a process is lost, for good or until it is reached again; empty if not."""
        peer = self._switch.peers.get(name)
        if peer is None:
            return ""
        return peer.suspected if peer.error is None else str(peer.error)

    def trouble(self, name: Name) -> str:
        """Return why a process could not be called, the last time; empty if it was not tried."""
        peer = self._switch.peers.get(name)
        return "" if peer is None else peer.trouble

    def close_lane(self, lane: int) -> Future[None]:
        """End what is under way on a lane, and tell all peers that nothing comes there.

        The future is done once no byte of what was to be sent is looked at any more, or only on the
        way to who has been given up.
        """
        why, let_go = LinkDown("this rank has closed its transport"), Future[None]()

        def close() -> None:
            for peer in self._switch.peers.values():
                if peer.error is None:
                    peer.mailbox.close_lane(lane, why)
            self._letting_go.append((lane, let_go))

        self._post(close)
        return let_go

    def latency_seconds(self, to: Name) -> float:
        """Return the least time there and back that was seen, 0 if none was."""
        peer = self._switch.peers.get(to)
        return 0.0 if peer is None else peer.latency_seconds

    def figures(self, of: Name) -> LinkFigures | None:
        """Return what the link to a process is like; None before it was there."""
        peer = self._switch.peers.get(of)
        if peer is None or not peer.is_met:
            return None
        return LinkFigures(
            peer.latency_seconds, peer.last_latency_seconds, peer.sent_bytes, peer.received_bytes
        )

    @property
    def problems(self) -> Counter[str]:
        """What was dropped, by its reason."""
        return self._switch.dropped.counts

    def close(self) -> None:
        """End all connections, once what was sent has arrived, or after a second."""
        if self._closing_at is None:
            self._closing_at = time.monotonic()
            self._wake()
        self._thread.join(_JOIN_SECONDS)

    def _transfer(self, name: Name, begin: Callable[[Peer, Ended], object]) -> Future[None]:
        ended: Future[None] = Future()

        def end(error: Exception | None) -> None:
            ended.set_result(None) if error is None else ended.set_exception(error)

        def post() -> None:
            begin(self._switch.peer(name), end)

        self._post(post)
        return ended

    def _post(self, do: Callable[[], object]) -> None:
        self._posted.append(do)
        self._wake()
        if self._has_ended:  # nobody else does it any more, and it finds peers gone
            self._do_posted()

    def _do_posted(self) -> None:
        with self._doing:
            while self._posted:
                self._posted.popleft()()
            if self._has_ended:
                self._let_go()

    def _let_go(self) -> None:
        """Tell who waits for closed lanes of those that libzmq holds nothing of."""
        if self._letting_go:
            all_peers = self._switch.peers.values()
            peers = [peer for peer in all_peers if peer.error is None and not peer.suspected]
            waiting, self._letting_go = self._letting_go, []
            for lane, let_go in waiting:
                if any(peer.holds(lane) for peer in peers):
                    self._letting_go.append((lane, let_go))
                else:
                    let_go.set_result(None)

    def _wake(self) -> None:
        with suppress(OSError):  # it has been woken already, or has ended
            self._wake_up.send(b"\0")

    def _run(self) -> None:
        switch, why = self._switch, "this rank has closed its link"
        try:
            while not self._may_close():
                seconds = min(switch.pace.wait_seconds() or _LOOK_SECONDS, _LOOK_SECONDS)
                ready = dict(switch.poller.poll(max(int(seconds * 1000), 1)))
                if ready.pop(self._woken.fileno(), None):
                    self._woken.recv(4096)
                self._do_posted()
                if switch.take(ready):
                    self._tell()
                self._let_go()
        except Exception as error:
            logger.exception("the link's thread has ended by an error")
            why = f"this rank's link has ended by an error: {error}"
        finally:
            switch.end(why)
            self._has_ended = True
            self._do_posted()  # what has come meanwhile; later ones see that it has ended
            self._tell()
            self._wake_up.close()
            self._woken.close()

    def _tell(self) -> None:
        with self._there:
            self._there.notify_all()

    def _may_close(self) -> bool:
        if self._closing_at is None:
            return False
        peers = self._switch.peers.values()
        is_sending = bool(self._posted) or any(peer.mailbox.has_outgoing for peer in peers)
        return not is_sending or time.monotonic() > self._closing_at + _LINGER_SECONDS
