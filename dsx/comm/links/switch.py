"""What a link's thread does: take frames from sockets to mailboxes, and back.

A frame that says another sender than its key does is dropped and counted, like all that is wrong.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import zmq

from dsx.comm.links import sockets
from dsx.comm.links.callers import Caller, Callers
from dsx.comm.links.calls import Call, Calls
from dsx.comm.links.dropped import Dropped
from dsx.comm.links.frames import (
    ACKS,
    AGAIN,
    ANSWER,
    ASK,
    BY_KEY,
    CLOSED,
    DATA,
    HELLO,
    PROBE,
    READY,
    BadFrame,
    Frame,
    read_acks,
)  # fmt: skip
from dsx.comm.links.held import LET_GO, Held
from dsx.comm.links.hello import Hello
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.pace import Pace
from dsx.comm.links.peer import Connection, LinkDown, Peer
from dsx.comm.links.requests import Name, Requests

_AT_ONCE = 256  # frames taken from a socket before others have their turn
_LINGER_MILLISECONDS = 500  # for what a socket that is closed has not sent yet
_MOST_PAUSE_SECONDS = 0.2  # between two looks of a thread that gets its turns
_MOST_IO_THREADS = 4  # of libzmq, which encrypt: as many as there are streams
_MOST_UNEXPECTED = 4096  # ranks of a cluster that have called and were not expected, yet or at all
_KEYS_SECONDS = 1.0  # between two looks at the folder of keys
logger = logging.getLogger(__name__)


class Switch:
    """A link's sockets and peers; used by its thread alone, but for what is said to be read."""

    def __init__(
        self, own: Name, trust: sockets.Trust | None, options: LinkOptions, pace: Pace
    ) -> None:
        self.own, self.pace = own, pace
        self.incarnation = time.time_ns()
        self._trust, self._options = trust, options
        self.readmits = False  # whether a cluster's next process takes the place of one given up
        self._own_key = None if trust is None else trust.public_key
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.IO_THREADS, min(options.streams, _MOST_IO_THREADS))
        self.poller = zmq.Poller()
        self.peers: dict[Name, Peer] = {}  # read by others
        self._num_unexpected: Counter[int] = Counter()  # of them, by cluster
        try:
            self._open(trust, options)
        except BaseException:  # a context that is left to the garbage collector may block it
            self._context.destroy(0)
            raise

    def _open(self, trust: sockets.Trust | None, options: LinkOptions) -> None:
        self._calls = Calls(self._context, self.poller, trust, options.dscp)
        self.held = Held(self._calls)
        self._keys_at = 0.0
        self._looked_at = time.monotonic()
        self.requests = Requests(self.own)
        self._ended = ""  # why
        self.dropped = Dropped()
        self._drop = self.dropped.note
        refused = partial(self._drop, "a key of no member")
        self._door = None if trust is None else sockets.Door(self._context, trust, refused)
        if self._door is not None:
            self.poller.register(self._door.socket, zmq.POLLIN)
        self._callers = Callers(self._context, self.poller, trust, options)
        self.port = self._callers.port

    def peer(self, name: Name) -> Peer:
        """Return a peer, a new one if it is not known yet."""
        if name not in self.peers:
            grace, suspect = self._options.grace_seconds, self._options.suspect_seconds
            self.peers[name] = Peer(self.own[0], *name, grace, suspect)
            if self._ended:
                self.peers[name].end(self._ended)
        return self.peers[name]

    def expect(
        self, name: Name, address: str | None, incarnation: int | None, slot: int = 0
    ) -> None:
        """Exchange messages with a process: call it, or wait for its call."""
        peer = self._readmitted(self.peer(name), incarnation or 0)
        if incarnation is not None:
            if peer.incarnation not in (None, incarnation):
                self.give_up(peer, "another process has taken its place")
            peer.incarnation, peer.is_chosen = incarnation, True
        if self._trust is not None and not self._trust.keys_of(name[0]):
            self.give_up(peer, "it has no key, or its key has been revoked")
        if address is not None and peer.error is None:
            self._calls.reach(peer, self._options.streams + 1, (address, slot))

    def _readmitted(self, peer: Peer, incarnation: int) -> Peer:
        """Return who takes a peer's place if this is a later process: that one has ended then."""
        if self._ended or not (self.readmits and peer.is_before(incarnation)):
            return peer
        self.give_up(peer, "another process has taken its place")  # unless it had been before
        self._callers.forget(peer)
        del self.peers[name := (peer.cluster_id, peer.rank)]
        return self._calls.move(peer, self.peer(name))

    def take(self, ready: dict[Any, int]) -> bool:
        """Take what has come on sockets; return whether a peer may have come or gone."""
        before = [(peer.is_there, peer.error) for peer in self.peers.values()]
        for each in ready:
            if self._door is not None and each is self._door.socket:
                self._door.answer()
            elif each is self._callers.socket:
                self._take_called()
            elif each is self._callers.monitor:
                self._callers.take_events()
            elif each in self._calls.by_monitor:
                for stands in self._calls.events(call := self._calls.by_monitor[each]):
                    if stands:
                        self._greet(self._connection_of(call), call.index)
                    elif call.peer.is_over(call.index, call.socket):
                        call.peer.close(call.index)
            elif each in self._calls.by_socket:
                self._take_calling(self._calls.by_socket[each])
        self._callers.close_ended()
        self._calls.make_ended_ones_anew()
        self._look()
        return before != [(peer.is_there, peer.error) for peer in self.peers.values()]

    def give_up(self, peer: Peer, why: str) -> None:
        """Count a peer as gone for good: all that waits for it gets the reason."""
        peer.end(why)
        self.requests.give_up(peer)

    def end(self, why: str) -> None:
        """Give all peers up, and end all connections."""
        self._ended = why
        for peer in self.peers.values():
            if peer.error is None:
                peer.flush_replies()  # acknowledgements, and which lanes are closed
            self.give_up(peer, why)
        self._calls.end(_LINGER_MILLISECONDS)
        self._context.destroy(_LINGER_MILLISECONDS)

    def _look(self) -> None:
        """Look after peers, and after keys now and then."""
        now = time.monotonic()
        paused, self._looked_at = now - self._looked_at - _MOST_PAUSE_SECONDS, now
        if self._trust is not None and now >= self._keys_at:
            self._keys_at = now + _KEYS_SECONDS
            self._take_keys(self._trust)
        for peer in [*self.peers.values()]:
            if paused > 0:  # this process stood still: what came meanwhile has not been taken
                peer.excuse(paused)
            why = peer.look(now)
            is_kept = why is not None and self.held.keeps(peer, why, now)
            if is_kept and self.held.is_outside:
                self.requests.give_up(peer)  # whoever heals asks another one
            if why is not None and not is_kept and peer.is_met:
                self.give_up(peer, why)
                if peer.is_visitor:
                    del self.peers[peer.cluster_id, peer.rank]
                    self._num_unexpected[peer.cluster_id] -= 1
                    self._callers.forget(peer)
            elif peer.error is None and not is_kept:
                self.held.is_back(peer)
                if stall := peer.stall(now):
                    logger.warning("%s: %s, and its connections are made anew", peer, stall)
                    if not self._calls.call_anew(peer, tells=True):
                        peer.ask_for_a_call()
                    peer.renewed()
                peer.flush(self.pace)
            for problem in peer.mailbox.problems:
                self._drop(problem, f"{peer}")
            peer.mailbox.problems.clear()

    def _take_keys(self, trust: sockets.Trust) -> None:
        """Follow what has changed in the folder of keys: also what is revoked, at once."""
        changed = trust.reload()
        if not changed:
            return
        for peer in [*self.peers.values()]:
            if peer.cluster_id in changed and not trust.keys_of(peer.cluster_id):
                self.give_up(peer, "its key has been revoked")
            for index, connection in [*peer.connections.items()]:
                if connection.key is not None and trust.cluster_of(connection.key) is None:
                    peer.close(index)
        self._calls.renew(changed)
        if trust.public_key != self._own_key:
            self._own_key = trust.public_key
            logger.warning("this cluster's key has changed: its connections are made anew")
            self._callers.listen_again()
            self._calls.renew()

    def _connection_of(self, call: Call) -> Connection:
        key = None if self._trust is None else sockets.key_of_text(call.key)
        return Connection(call.socket, None, call.number, key)

    def _greet(self, connection: Connection, index: int, over: int = 0) -> None:
        body = Hello(self.own[1], index, connection.number, self.incarnation, over).pack()
        connection.send(Frame(HELLO, self.own[0]).pack(len(body)), body)

    def _take_called(self) -> None:
        """Take what those send who have called here."""
        for identity, parts in self._callers.frames(_AT_ONCE):
            sender, key = None, None
            if self._trust is not None:
                key = sockets.key_of_text(parts[-1].get("User-Id").encode())
                sender = self._trust.cluster_of(key)
                if sender is None:
                    self._drop("a frame under a revoked key", "one who had called")
                    continue
            read = self._read(parts, sender)
            if read is None:
                continue
            frame, body = read
            known = self._callers.whose(identity)
            if frame.kind == HELLO:
                by = Caller(identity, int(parts[-1].get(zmq.SRCFD)), key)
                self._take_hello(frame.sender, bytes(body), by)
            elif known is None:
                self._drop("a frame before a greeting", f"cluster {frame.sender}")
            else:  # of the process that is meant, also if it has ended since
                self._give(known[0], frame, body)

    def _take_calling(self, call: Call) -> None:
        """Take what one sends whom this rank has called."""
        for _ in range(_AT_ONCE):
            try:
                parts = call.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            read = self._read(parts, call.peer.cluster_id)
            if read is None:
                continue
            frame, body = read
            if frame.kind == HELLO:
                self._take_hello(frame.sender, bytes(body), call)
            elif call.greeted is call.peer:
                self._give(call.peer, frame, body)

    def _read(self, parts: list[Any], sender: int | None) -> tuple[Frame, memoryview] | None:
        """Return a frame's head and its body; None for what does not fit."""
        who = f"cluster {sender}" if sender is not None else "somebody"
        try:
            frame, body = Frame.of([part.buffer for part in parts])
        except BadFrame as error:
            self._drop(str(error), who)
            return None
        if sender is not None and frame.sender not in (sender, BY_KEY):
            self._drop("a frame that says another sender", who)
            return None
        is_named = sender is None or frame.sender == sender
        return frame if is_named else replace(frame, sender=sender), body

    def _give(self, peer: Peer, frame: Frame, body: memoryview) -> None:
        """Hand a frame to whom it is for."""
        if peer.error is not None:
            return
        peer.heard(len(body))
        mailbox = peer.mailbox
        try:
            if frame.kind == DATA:
                mailbox.take_chunk(frame, body)
            elif frame.kind == ACKS:
                mailbox.take_acks(read_acks(body))
            elif frame.kind == READY:
                mailbox.take_ready(frame)
            elif frame.kind == CLOSED:
                mailbox.take_closed(frame, LinkDown(f"{peer} has closed its transport"))
            elif frame.kind == PROBE:
                peer.answer_probe(frame)
                mailbox.forget_below(frame.serial)
            elif frame.kind == AGAIN:  # to be called, or that it calls
                peer.take_again(is_renewing=frame.start > 0)
            elif frame.kind == ASK:
                self.requests.take(peer, frame.serial, bytes(body))
            elif frame.kind == ANSWER:
                self.requests.take_answer(peer, frame.serial, bytes(body))
        except BadFrame as error:
            self._drop(str(error), f"{peer}")

    def _take_hello(self, sender: int, body: bytes, by: Call | Caller) -> None:
        """Take a greeting: of who has called (identity and key), or the answer to one's own."""
        try:
            hello = Hello.read(body)
        except BadFrame as error:
            return self._drop(str(error), f"cluster {sender}")
        index, name = hello.connection, (sender, hello.rank)
        if hello.over:
            if self.held.is_let_go(peer := self.peers.get(name), hello, self.incarnation):
                self.give_up(self.peers[name], LET_GO)
            elif peer is not None and peer.is_apart and isinstance(by, Call):
                self._greet(self._connection_of(by), index, over=hello.incarnation)
            return
        if index > self._options.streams:
            count = self._options.streams + 1
            return self._drop(
                f"connection {index}, of {count} by link.streams", f"cluster {sender}"
            )
        if isinstance(by, Call) and (by.peer is not self.peers.get(name) or by.index != index):
            by.peer.trouble = f"cluster {sender}, rank {hello.rank} answers at {by.address[0]}"
            return self._drop("an answer of another rank than was called", by.peer.trouble)
        if name not in self.peers:
            if self._num_unexpected[sender] >= _MOST_UNEXPECTED:
                what = f"a greeting of one more than {_MOST_UNEXPECTED} ranks"
                return self._drop(what, f"rank {hello.rank} of cluster {sender}")
            self._num_unexpected[sender] += 1
        peer = self._readmitted(self.peer(name), hello.incarnation)
        if peer.gives_way_to(hello.incarnation) and not isinstance(by, Call):
            self.give_up(self.peers.pop(name), "another process has taken its place")
            peer = self.peer(name)
        peer.incarnation = peer.incarnation or hello.incarnation
        if hello.incarnation != peer.incarnation:
            return self._drop("a greeting of another process than the one that is meant", f"{peer}")
        if peer.error is not None:
            self._drop("a greeting of a process that has been given up", f"{peer}")
            if not (self.held.has_ended or peer.has_let_go):  # else it is this one that is out
                is_call = isinstance(by, Call)
                back = self._connection_of(by) if is_call else self._called(by, hello)
                self._greet(back, index, over=hello.incarnation)
            return
        if isinstance(by, Call):
            by.greeted = peer
            peer.open(index, self._connection_of(by))
            return
        known = peer.connections.get(index)
        if known is not None and known.number > hello.number:
            return  # of a connection that has been replaced
        self._callers.take(peer, index, by)
        self._greet(connection := self._called(by, hello), index)
        peer.open(index, connection)

    def _called(self, by: Caller, hello: Hello) -> Connection:
        return Connection(self._callers.socket, by.identity, hello.number, by.key)
