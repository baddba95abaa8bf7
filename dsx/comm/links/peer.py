"""One process of another cluster: its connections, what it is owed, and whether it is there.

Connection 0 is for what is short and must not wait: greetings, acknowledgements, probes, requests,
short messages. The others carry all messages. A peer is there while connection 0 is; it has gone
when that has been closed (before it first stood: when no other is left) and not come back within
`grace_seconds`, or when nothing was heard for `suspect_seconds`.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import zmq

from dsx.comm.links.frames import ACKS, AGAIN, ASK, JOINED_BYTES, PROBE, Frame, pack_acks
from dsx.comm.links.mailbox import Mailbox
from dsx.comm.links.pace import Pace
from dsx.comm.links.stall import Stall

SIGNS_PER_SUSPICION = 4  # of life, in the silence after which a peer is given up
_FIRST_PROBES = 8  # closer together, for the least time there and back
_FIRST_PROBE_SECONDS = 0.25
_ROUND_TRIPS_TO_RETURN = 6  # of TCP's and CURVE's greetings
_LAST_ROUND_TRIPS = 5  # which say how long one takes now: busy hosts and lines take longer
_ACKS_IN_A_FRAME = 4096
_STALLS_PER_SUSPICION = 2  # connections are made anew before their peer is given up
_RENEWALS_PER_SUSPICION = 4  # in which connections that are made anew may be closed
_RENEWAL_SECONDS = 1.0  # between two times that a peer is called anew because it asks for it
_DONE = zmq.MessageTracker()  # of what is copied
_ACK_SECONDS = 0.1  # in which acknowledgements that nobody waits for may become more
FIRST_VISITOR = 1 << 19  # ranks from here on are tools of a member, which come and go (desk.py)


class LinkDown(RuntimeError):
    """A peer has gone; the text says how it was noticed."""


class Connection:
    """A way to a peer that stands: frames go out by `send`, False if it is there no more."""

    def __init__(
        self, socket: Any, identity: bytes | None, number: int, key: bytes | None = None
    ) -> None:
        self.socket = socket
        self._address = [] if identity is None else [identity]
        self.number = number  # of the caller's, counted from 1: a higher one replaces a lower
        self.key = key  # the peer's public one, 32 bytes

    def send(self, head: bytes, body: Any) -> bool:
        """Hand a frame to libzmq; what is short is copied, and it keeps a hold of the rest."""
        return self.lend(head, body) is not None

    def lend(self, head: bytes, body: Any) -> Any | None:
        """Hand a frame over; None if that cannot be, else something that is `done` once libzmq
        looks at the body no more.
        """  # fmt: skip
        is_short = len(body) <= JOINED_BYTES
        parts = [b"".join((head, body))] if is_short else [head, body]
        try:
            return (
                self.socket.send_multipart(
                    [*self._address, *parts], zmq.NOBLOCK, copy=is_short, track=not is_short
                )
                or _DONE
            )
        except zmq.ZMQError:  # no route any more
            return None


class Peer:
    """A process of another cluster, by its cluster, its rank and when it was started."""

    def __init__(
        self, own: int, cluster_id: int, rank: int, grace_seconds: float, suspect_seconds: float
    ) -> None:
        self._own = own
        self.cluster_id, self.rank = cluster_id, rank
        self.incarnation: int | None = None
        self.is_chosen = False  # no other process of this name is meant
        self.mailbox = Mailbox(own)
        self.connections: dict[int, Connection] = {}
        self.error: LinkDown | None = None
        self.suspected = ""  # why it is lost, while it may come back (held.py)
        self.was_member = False  # of a view, as this process
        self.has_let_go = False  # it goes on without this process, and has said so
        self.is_apart = False  # each has left the other out, and goes on
        self.trouble = ""  # why it could not be called, the last time
        self.latency_seconds = 0.0  # there and back, the least seen
        self.sent_bytes = self.received_bytes = 0  # of messages, also of those sent again
        self._round_trips: deque[float] = deque(maxlen=_LAST_ROUND_TRIPS)  # in seconds
        self.asked: dict[int, bytes] = {}  # requests without an answer, by number
        self._lent: dict[int, deque[Any]] = {}  # by lane: what libzmq may look at still
        self._grace_seconds, self._suspect_seconds = grace_seconds, suspect_seconds
        self._lost_at: float | None = None
        self._heard_at = time.monotonic()
        self._probe_at, self._num_probes = 0.0, 0
        self._told_serial = 0  # the last one that it may forget all below
        self._acks_at: float | None = None  # when those that are there have to go out
        self._has_stood = self._has_met = False  # any connection, and number 0
        self._stall = Stall(suspect_seconds / _STALLS_PER_SUSPICION, self._heard_at)
        self._renewed_at, self.is_not_heard = 0.0, False  # as it says
        self._renewing_until = 0.0  # until then a connection that is closed says nothing

    def __str__(self) -> str:
        return f"cluster {self.cluster_id} (rank {self.rank})"

    @property
    def is_there(self) -> bool:
        """Whether messages can be exchanged now."""
        return self.error is None and 0 in self.connections and len(self.connections) > 1

    @property
    def is_met(self) -> bool:
        """Whether it has ever been there."""
        return self._has_met

    @property
    def is_visitor(self) -> bool:
        """Whether it is no rank of the run: nobody remembers it once it has gone."""
        return self.rank >= FIRST_VISITOR

    def is_before(self, incarnation: int) -> bool:
        """Whether that is of a later process."""
        return self.incarnation is not None and incarnation > self.incarnation

    def gives_way_to(self, incarnation: int) -> bool:
        """Whether a later process takes its place: while clusters meet, once this one is gone."""
        return self.is_before(incarnation) and not self.is_chosen and 0 not in self.connections

    def open(self, index: int, connection: Connection) -> None:
        """Take a connection that stands, in place of an earlier one."""
        self.close(index)
        self.connections[index] = connection
        self._heard_at, self._has_stood = time.monotonic(), True
        if index == 0 or not self._has_met:
            self._lost_at = None
        if index == 0:
            self._renewing_until, self._has_met = 0.0, True
            for other in [*self.connections]:  # acknowledgements may have been lost with it
                self.mailbox.connection_lost(other)
            for number, body in self.asked.items():
                self.say(Frame(ASK, self._own, serial=number), body)

    def close(self, index: int) -> None:
        """Forget a connection that is there no more."""
        if self.connections.pop(index, None) is not None:
            self.mailbox.connection_lost(index)
            if index == 0 or not (self._has_met or self.connections):
                now = time.monotonic()
                self._lost_at = None if now < self._renewing_until else now

    def stall(self, now: float) -> str:
        """Say why its connections are to be made anew, though they stand; empty if they are not."""
        is_not_heard, self.is_not_heard = self.is_not_heard, False
        if 0 not in self.connections or self.is_visitor:
            return ""
        if is_not_heard and now > self._renewed_at + _RENEWAL_SECONDS:
            return "it hears nothing from here"
        seconds = self._stall.seconds(now, self._heard_at, self.mailbox.owed_since)
        return "" if seconds is None else f"nothing has come through for {seconds:.1f} s"

    def renewed(self) -> None:
        """Its connections are being made anew from here."""
        self._renewed_at = time.monotonic()
        self._stall.renewed(self._renewed_at)
        self._expect_it_back()

    def take_again(self, is_renewing: bool) -> None:
        """Take the word that it makes its connections anew, or asks for it, as it hears nothing."""
        if is_renewing:
            self._expect_it_back()
        else:
            self.is_not_heard = True

    def _expect_it_back(self) -> None:
        """That its connections are closed says nothing now: it is lost if it stays silent."""
        self._lost_at = None
        self._renewing_until = time.monotonic() + self._suspect_seconds / _RENEWALS_PER_SUSPICION

    def tell_of_renewal(self) -> None:
        """Say that its connections are made anew, before they are closed."""
        self.say(Frame(AGAIN, self._own, start=1), b"")

    def ask_for_a_call(self) -> None:
        """Ask over whatever stands that it makes its connections anew."""
        frame = Frame(AGAIN, self._own)
        for index, connection in [*self.connections.items()]:
            if not connection.send(frame.pack(0), b""):
                self.close(index)

    @property
    def last_latency_seconds(self) -> float:
        """There and back, the last time; 0 where nothing has been measured."""
        return self._round_trips[-1] if self._round_trips else 0.0

    @property
    def silent_seconds(self) -> float:
        """For how long nothing has come from it."""
        return time.monotonic() - self._heard_at

    def is_over(self, index: int, socket: Any) -> bool:
        """Whether what stands is a connection of that socket: not one that was called from there,
        as by a process that has taken the place of the one before.
        """
        connection = self.connections.get(index)
        return connection is not None and connection.socket is socket

    def heard(self, num_bytes: int = 0) -> None:
        """Note that something has come from it."""
        self._heard_at = time.monotonic()
        self.received_bytes += num_bytes

    def end(self, why: str) -> None:
        """Give it up for good: all that waits for it gets the reason."""
        if self.error is None:
            self.error = LinkDown(why)
            self.connections.clear()
            self.mailbox.end(self.error)

    def _grace(self) -> float:
        """How long a closed connection may be away: longer on a long line, or of a busy host."""
        round_trip = statistics.median(self._round_trips or [0.0])
        longer = min(_ROUND_TRIPS_TO_RETURN * round_trip, self._suspect_seconds / 4)
        return self._grace_seconds + longer

    def look(self, now: float) -> str | None:
        """Probe it where it is time; return why it has to be given up, if it has."""
        if self.error is not None or not self._has_stood:
            return None
        if self._lost_at is not None and now - self._lost_at > (grace := self._grace()):
            return f"its connection was closed and did not come back within {grace:.1f} s"
        silent = now - self._heard_at
        if silent > self._suspect_seconds:
            return f"nothing was heard of it for {silent:.1f} s (link.suspect_seconds)"
        if self._has_met and now >= self._probe_at and self._has_reason_to_probe(now):
            self._probe_at = now + self._sign_seconds
            self._num_probes += 1
            self._told_serial = self.mailbox.first_serial
            frame = Frame(PROBE, self._own, start=time.monotonic_ns(), serial=self._told_serial)
            self.say(frame, b"")
        return None

    @property
    def _sign_seconds(self) -> float:
        each = self._suspect_seconds / SIGNS_PER_SUSPICION
        return min(each, _FIRST_PROBE_SECONDS) if self._num_probes < _FIRST_PROBES else each

    def _has_reason_to_probe(self, now: float) -> bool:
        """Whether it has been silent, does not know what has arrived, or how far it is unknown."""
        is_silent = now >= self._heard_at + self._sign_seconds
        is_told = self._told_serial == self.mailbox.first_serial
        return is_silent or not is_told or self._num_probes < _FIRST_PROBES

    def excuse(self, seconds: float) -> None:
        """Do not count a time in which this process itself has not looked."""
        now = time.monotonic()
        self._heard_at = min(self._heard_at + seconds, now)
        self._stall.excuse(seconds, now)
        if self._lost_at is not None:
            self._lost_at = min(self._lost_at + seconds, now)

    def answer_probe(self, frame: Frame) -> None:
        """Send a probe back, or take the time of one's own that has come back."""
        if frame.total:
            seconds = (time.monotonic_ns() - frame.total) / 1e9
            self.latency_seconds = min(self.latency_seconds or seconds, seconds)
            self.mailbox.latency_seconds = self.latency_seconds
            self._round_trips.append(seconds)
        else:
            first = self.mailbox.first_serial
            self.say(Frame(PROBE, self._own, total=frame.start, serial=first), b"")

    def ask(self, number: int, body: bytes) -> None:
        """Send a request, again with each new connection until there is an answer."""
        self.asked[number] = body
        self.say(Frame(ASK, self._own, serial=number), body)

    def flush_replies(self, at_once: bool = True) -> None:
        """Send what is short: acknowledgements, and words of places and lanes."""
        mailbox = self.mailbox
        if 0 not in self.connections:
            return
        replies, mailbox.replies = mailbox.replies, []
        for frame, body in replies:
            self.say(frame, body)
        if mailbox.acks and (at_once or replies or self._acks_are_due()):
            acks, mailbox.acks, mailbox.is_waited_for = mailbox.acks, [], False
            self._acks_at = None
            for first in range(0, len(acks), _ACKS_IN_A_FRAME):
                packed = pack_acks(acks[first : first + _ACKS_IN_A_FRAME])
                self.say(Frame(ACKS, self._own), packed)

    def _acks_are_due(self) -> bool:
        now = time.monotonic()
        self._acks_at = now + _ACK_SECONDS if self._acks_at is None else self._acks_at
        return self.mailbox.acks_are_due or now >= self._acks_at

    def flush(self, pace: Pace) -> None:
        """Send what waits, as far as windows and the pace allow; short messages first."""
        self.flush_replies(at_once=False)
        for is_short in (True, False):
            is_moving = True
            while is_moving:
                is_moving = False
                for index in [i for i in self.connections if (i == 0) == is_short]:
                    if pace.wait_seconds():
                        return
                    num_bytes = self._send_next(index)
                    pace.sent(num_bytes)
                    is_moving = is_moving or num_bytes > 0

    def holds(self, lane: int) -> bool:
        """Whether libzmq may look at bytes of a lane's messages still."""
        lent = self._lent.get(lane, deque())
        while lent and lent[0].done:
            lent.popleft()
        if not lent:
            self._lent.pop(lane, None)
        return bool(lent)

    def _send_next(self, index: int) -> int:
        """Send what is next over a connection; return how many bytes of messages that were."""
        found = self.mailbox.next_chunk(index)
        if found is None:
            return 0
        frame, body = found
        lent = self.connections[index].lend(frame.pack(len(body)), body)
        if lent is None:
            self.close(index)
            return 0
        if not lent.done:
            self.holds(frame.key.lane)  # which forgets what has gone out
            self._lent.setdefault(frame.key.lane, deque()).append(lent)
        self.sent_bytes += len(body)
        return len(body)

    def say(self, frame: Frame, body: bytes) -> None:
        """Send something short, if there is a connection."""
        connection = self.connections.get(0)
        if connection is not None:
            if connection.send(frame.pack(len(body)), body):
                self.sent_bytes += len(body)
            else:
                self.close(0)
