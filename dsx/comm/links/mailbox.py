"""The messages between this rank and one peer: cut in chunks, acknowledged, put together again.

No sockets here: what is to be sent is asked for, what has come is told. A chunk is kept until it
has been acknowledged, and sent again when the connection that carried it has broken; whatever comes
twice is acknowledged twice and written once. So a message arrives whole, once, whatever happens to
connections.

A receiver that has no place yet for a message keeps its first `EAGER_BYTES`; the sender goes on
once it is told of a place.

Messages take turns, a chunk each, and what is under way on a connection is bounded by what it
carries in a moment (window.py): a long message does not keep others waiting. Short ones have
connection 0 to themselves, where no chunk of a long one is ahead of them.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from dsx.comm.links.frames import CHUNK_BYTES, CLOSED, READY, Ack, Frame, Key
from dsx.comm.links.messages import (
    EAGER_BYTES,
    TAGS_KEPT,
    Counters,
    Early,
    Ended,
    Incoming,
    Outgoing,
    Serials,
)
from dsx.comm.links.window import SHORT_WINDOW_BYTES, Sent, Window

COPIED_BYTES = 1 << 16  # a message so short is copied, and has been sent as soon as it is posted
EARLY_BYTES = 1 << 26  # of messages without a place, from one peer
ACKS_TOGETHER = 16  # of short messages, whose senders do not wait for them


class Mailbox:
    """Messages to and from one peer. Not for several threads.

    `replies` are frames with their bodies, and `acks` chunks, to be sent; whoever sends them takes
    them out. `problems` are what the peer has sent that does not fit. `latency_seconds`: what a
    line without a queue takes there and back, for whoever knows it.
    """

    def __init__(self, cluster_id: int, now: Callable[[], float] = time.monotonic) -> None:
        self._cluster_id, self._now = cluster_id, now
        self.latency_seconds = 0.0
        self._sent, self._received = Counters(), Counters()
        self._outgoing: dict[int, Outgoing] = {}  # by serial
        self._by_key: dict[Key, Outgoing] = {}
        self._turns: deque[Outgoing] = deque()
        self._short_turns: deque[Outgoing] = deque()  # which have a turn among all, too
        self._incoming: dict[Key, Incoming] = {}
        self._early: dict[Key, Early] = {}
        self._early_bytes = 0
        self._awaited: OrderedDict[Key, bool] = OrderedDict()  # places told of before the message
        self._complete = Serials()
        self._closing: set[int] = set()  # lanes, here
        self._closed: dict[int, Exception] = {}  # lanes, by the peer
        self._closed_here: set[int] = set()
        self._over: set[int] = set()  # lanes closed on either side: what still comes is let go
        self._ended: Exception | None = None
        self._next_serial = 0
        self._windows: dict[int, Window] = {}  # by connection
        self.replies: list[tuple[Frame, bytes]] = []
        self.acks: list[Ack] = []
        self.is_waited_for = False  # an acknowledgement among them
        self.problems: list[str] = []

    @property
    def has_outgoing(self) -> bool:
        """Whether something has not arrived."""
        return bool(self._outgoing)

    @property
    def first_serial(self) -> int:
        """Of what has not arrived, or of the next message: nothing below it is sent any more."""
        return next(iter(self._outgoing), self._next_serial)

    @property
    def owed_since(self) -> float:
        """When the oldest chunk was sent whose acknowledgement is due; infinite for none."""
        return min((each.owed_since for each in self._outgoing.values()), default=math.inf)

    @property
    def acks_are_due(self) -> bool:
        """Whether acknowledgements have to go out now, and not with others a moment later."""
        return self.is_waited_for or len(self.acks) >= ACKS_TOGETHER

    @property
    def num_single_serials(self) -> int:
        """Of complete messages that are remembered singly."""
        return self._complete.num_kept

    @property
    def early_bytes(self) -> int:
        """Of messages that have no place yet."""
        return self._early_bytes

    def send(self, lane: int, tag: int, data: memoryview, ended: Ended) -> None:
        """Post a message, whose bytes must stay until `ended` is called, with None if it is there.

        What is short is copied, and `ended` called at once.
        """
        if self._ended or lane in self._closed or not len(data):
            ended(self._ended or self._closed.get(lane))
            return
        is_short = len(data) <= COPIED_BYTES
        if is_short:
            data = memoryview(bytes(data))
        outgoing = Outgoing(self._sent.take(lane, tag), self._next_serial, data, ended)
        self._next_serial += 1
        outgoing.is_awaited = self._awaited.pop(outgoing.key, False)
        self._outgoing[outgoing.serial] = self._by_key[outgoing.key] = outgoing
        self._turns.append(outgoing)
        if is_short:
            self._short_turns.append(outgoing)
            outgoing.is_short, outgoing.ended = True, lambda error: None
            ended(None)

    def receive(self, lane: int, tag: int, place: memoryview, ended: Ended) -> None:
        """Give a message its place, bytes of its length, which is written until `ended`.

        One that had come before its sender has closed the lane, or has gone, is still there.
        """
        over = self._ended or self._closed.get(lane)
        if not len(place):
            ended(over)
            return
        incoming = Incoming(self._received.take(lane, tag), place, ended)
        early = self._early.get(incoming.key)
        if over is not None and (early is None or not early.is_complete):
            ended(over)
            return
        self._early.pop(incoming.key, None)
        self._incoming[incoming.key] = incoming
        is_whole = early is None or early.is_whole
        if len(place) > EAGER_BYTES or not is_whole:
            self._reply(READY, incoming.key, start=int(not is_whole))
        if early is not None:
            self._early_bytes -= early.num_bytes
            for chunk, body in early.chunks.items():
                self._fill(incoming, early.serial, chunk, early.total, body)

    def next_chunk(self, connection: int) -> tuple[Frame, memoryview] | None:
        """Return what goes out next over a connection; None if nothing may now."""
        window = self._window(connection)
        turns = self._turns if connection else self._short_turns
        while turns and window.is_open:
            outgoing = turns.popleft()
            if not outgoing.has_next:
                continue  # it is in turn again once it has
            chunk = outgoing.to_send.popleft()
            turns.append(outgoing)
            bounds = outgoing.bounds(chunk)
            body = outgoing.data[bounds]
            outgoing.under_way[chunk] = window.send(len(body), self._now())
            return outgoing.frame(self._cluster_id, bounds.start), body
        return None

    def forget_below(self, serial: int) -> None:
        """Take the word that the peer sends nothing any more below one of its `first_serial`s."""
        self._complete.raise_to(serial)

    def take_chunk(self, frame: Frame, body: Any) -> None:
        """Take a chunk that has come; `body` has a length and can be put into a memoryview."""
        chunk, early = frame.start // CHUNK_BYTES, self._early.get(frame.key)
        self.is_waited_for |= frame.total > COPIED_BYTES
        length = min(CHUNK_BYTES, frame.total - frame.start)
        if frame.start % CHUNK_BYTES or len(body) != length:
            self.problems.append(f"bytes {frame.start} to {frame.start + len(body)} are no chunk")
        elif early is not None and (early.total, early.serial) != (frame.total, frame.serial):
            self.problems.append("a message that is also said to be another")
        elif frame.serial in self._complete or frame.key.lane in self._over:
            self.acks.append(Ack(frame.serial, chunk, True))
        elif frame.key in self._incoming:
            self._fill(self._incoming[frame.key], frame.serial, chunk, frame.total, body)
        else:
            self._keep_early(frame, chunk, body)

    def take_acks(self, acks: list[Ack]) -> None:
        """Take what the peer has acknowledged."""
        for ack in acks:
            outgoing = self._outgoing.get(ack.serial)
            if outgoing is None:
                continue
            if ack.is_awaited:
                self._go_on(outgoing)
            if ack.chunk in outgoing.under_way:
                sent = self._take_back(outgoing, ack.chunk)
                if sent is not None and not outgoing.is_short:  # of short ones it may be late
                    self._window(sent.connection).arrived(sent, self._now(), self.latency_seconds)
            elif ack.chunk in outgoing.to_send:
                outgoing.to_send.remove(ack.chunk)  # it came, though its connection broke
            else:
                continue
            outgoing.num_acked += 1
            if outgoing.is_there:
                self._forget(outgoing)
                outgoing.ended(None)
                self._tell_closed(outgoing.key.lane)

    def take_ready(self, frame: Frame) -> None:
        """Take the word that a message has a place; with `start` some of it was let go there."""
        outgoing = self._by_key.get(frame.key)
        if outgoing is not None:
            if frame.start:
                self._send_again(outgoing, [*outgoing.under_way])
            self._go_on(outgoing)
        else:
            self._awaited[frame.key] = True
            if len(self._awaited) > TAGS_KEPT:
                self._awaited.popitem(last=False)

    def connection_lost(self, connection: int) -> None:
        """Send again what a connection has not brought, or whose acknowledgement it has lost."""
        for outgoing in self._outgoing.values():
            lost = [c for c, sent in outgoing.under_way.items() if sent.connection == connection]
            self._send_again(outgoing, lost)
        self._windows.pop(connection, None)
        for key in self._incoming:  # a word of their places may have been lost, too
            self._reply(READY, key)
        for lane in self._closed_here - self._closing:
            self._reply(CLOSED, Key(lane, 0, 0))

    def close_lane(self, lane: int, error: Exception) -> None:
        """End what is under way on a lane, but for what its sender takes for sent.

        The peer is told once that is there.
        """
        self._end_lane(lane, error, spares_short=True)
        self._drop_early([*self._early], lane)
        self._received.forget(lane)
        self._closing.add(lane)
        self._closed_here.add(lane)
        self._over.add(lane)
        self._tell_closed(lane)

    def take_closed(self, frame: Frame, error: Exception) -> None:
        """Take the word that the peer has closed a lane: nothing comes there any more."""
        self._closed[frame.key.lane] = error
        self._over.add(frame.key.lane)
        self._end_lane(frame.key.lane, error, spares_short=False)
        self._drop_early([k for k, e in self._early.items() if not e.is_complete], frame.key.lane)

    def end(self, error: Exception) -> None:
        """End all that is under way with an error."""
        self._ended = self._ended or error
        under_way = [*self._outgoing.values(), *self._incoming.values()]
        for each in (self._outgoing, self._by_key, self._incoming, self._windows):
            each.clear()
        self._turns.clear()
        self._short_turns.clear()
        for each in under_way:
            each.ended(error)

    def _end_lane(self, lane: int, error: Exception, spares_short: bool) -> None:
        for outgoing in [each for each in self._outgoing.values() if each.key.lane == lane]:
            if spares_short and outgoing.is_short:
                continue
            for chunk in [*outgoing.under_way]:
                self._take_back(outgoing, chunk)
            outgoing.to_send.clear()
            self._forget(outgoing)
            outgoing.ended(error)
        for incoming in [each for each in self._incoming.values() if each.key.lane == lane]:
            del self._incoming[incoming.key]
            incoming.ended(error)

    def _drop_early(self, keys: list[Key], lane: int) -> None:
        for key in keys:
            if key.lane == lane:
                self._early_bytes -= self._early.pop(key).num_bytes

    def _tell_closed(self, lane: int) -> None:
        if lane in self._closing and all(o.key.lane != lane for o in self._outgoing.values()):
            self._closing.remove(lane)
            self._sent.forget(lane)
            self._reply(CLOSED, Key(lane, 0, 0))

    def _reply(self, kind: int, key: Key, start: int = 0) -> None:
        self.replies.append((Frame(kind, self._cluster_id, key, start=start), b""))

    def _forget(self, outgoing: Outgoing) -> None:
        del self._outgoing[outgoing.serial], self._by_key[outgoing.key]

    def _go_on(self, outgoing: Outgoing) -> None:
        if not outgoing.is_awaited:
            outgoing.is_awaited = True
            self._in_turn(outgoing)

    def _window(self, connection: int) -> Window:
        window = self._windows.get(connection)
        if window is None:
            fixed = None if connection else SHORT_WINDOW_BYTES
            window = self._windows[connection] = Window(connection, fixed)
        return window

    def _take_back(self, outgoing: Outgoing, chunk: int) -> Sent | None:
        """Count a chunk as under way no more; return how it was sent, if its connection stands."""
        sent, bounds = outgoing.under_way.pop(chunk), outgoing.bounds(chunk)
        window = self._windows.get(sent.connection)
        if window is None or not window.take_back(sent, bounds.stop - bounds.start):
            return None
        return sent

    def _send_again(self, outgoing: Outgoing, chunks: list[int]) -> None:
        for chunk in chunks:
            self._take_back(outgoing, chunk)
        if chunks:
            outgoing.to_send.extendleft(sorted(chunks, reverse=True))
            self._in_turn(outgoing)

    def _in_turn(self, outgoing: Outgoing) -> None:
        for turns in (self._turns, self._short_turns) if outgoing.is_short else (self._turns,):
            if outgoing not in turns:
                turns.append(outgoing)

    def _keep_early(self, frame: Frame, chunk: int, body: Any) -> None:
        early = self._early.setdefault(frame.key, Early(frame.total, frame.serial))
        if chunk not in early.chunks:
            is_too_much = self._early_bytes + len(body) > EARLY_BYTES
            if is_too_much or frame.start + len(body) > EAGER_BYTES:
                early.is_whole = False  # it is asked for again, once there is a place
                return
            early.chunks[chunk] = body
            self._early_bytes += len(body)
        self.acks.append(Ack(frame.serial, chunk, False))

    def _fill(self, incoming: Incoming, serial: int, chunk: int, total: int, body: Any) -> None:
        if total != len(incoming.place):
            del self._incoming[incoming.key]
            incoming.ended(ValueError(f"{total} bytes came for {len(incoming.place)}"))
            return
        self.acks.append(Ack(serial, chunk, True))
        if chunk not in incoming.missing:
            return
        start = chunk * CHUNK_BYTES
        incoming.place[start : start + len(body)] = body
        incoming.missing.remove(chunk)
        if not incoming.missing:
            del self._incoming[incoming.key]
            self._complete.add(serial)
            incoming.ended(None)
