"""The connections that this rank opens to others: sockets that call, and call again when cut off.

A peer that changes its key has two for a while; who calls tries them in turn. What libzmq cannot
read ends a call for good (a byte that was changed on the way, a key that is not taken): libzmq does
not say then that it tries again, and it is made anew from here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from dsx.comm.links import sockets
from dsx.comm.links.peer import Peer

_NOT_TAKEN = "it does not take this cluster's key"
_TELL_MILLISECONDS = 200  # in which it goes out that calls are made anew
_TRIES_AGAIN_SECONDS = 0.1  # in which libzmq says so, as one of its threads does at once
_MOST_VAIN = 10  # that are counted
_MOST_SECONDS = 2.0  # before a call that has never stood is made anew: twice as long each time
_NOBODY = "nobody listens there, or the port is closed on the way"
_NOT_KNOWN = "who answers there has none of its keys, or is no link"


@dataclass(eq=False)
class Call:
    """One connection of ours, the `index`-th to its peer; `key` is the peer's, in Z85."""

    peer: Peer
    index: int
    address: tuple[str, int]  # host:port, and the rank's slot there
    key: bytes
    socket: Any
    monitor: Any
    number: int = 0  # of the connection that stands, or stood last
    greeted: Peer | None = None  # whose process answers, or answered last
    ended_at: float | None = None  # if it has, and libzmq has not said that it tries again
    num_vain: int = 0  # calls before it that have never stood

    def has_ended(self, now: float) -> bool:
        """Whether it has, for good."""
        if self.ended_at is None:
            return False
        return now > self.ended_at + min(_TRIES_AGAIN_SECONDS * 2**self.num_vain, _MOST_SECONDS)


class Calls:
    """All of a link's, and the sockets on which libzmq tells of them; in `poller`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller,
        trust: sockets.Trust | None,
        dscp: int = 0,
    ) -> None:
        self._context, self._poller, self._trust, self._dscp = context, poller, trust, dscp
        self.by_socket: dict[Any, Call] = {}
        self.by_monitor: dict[Any, Call] = {}
        self._numbers = itertools.count(1)  # of connections: a later one replaces an earlier

    def reach(self, peer: Peer, count: int, address: tuple[str, int]) -> None:
        """Call a peer at `host:port` and a slot there by `count` connections, if that is not done.

        What was called elsewhere for it, as for a process before it, is ended.
        """
        calls = [call for call in self.by_socket.values() if call.peer is peer]
        if any(call.address == address for call in calls):
            return
        for call in calls:
            self.hang_up(call)
        for index in range(count):
            self.call(peer, index, address)

    def move(self, before: Peer, after: Peer) -> Peer:
        """Go on calling at the same addresses, for another process, which is returned."""
        for call in self.by_socket.values():
            if call.peer is before:
                call.peer = after
        return after

    def call(
        self, peer: Peer, index: int, address: tuple[str, int], key: bytes | None = None
    ) -> Call:
        """Call a peer at `host:port` and a slot there, with a key of its or the first one."""
        if key is None:
            key = b"" if self._trust is None else self._trust.keys_of(peer.cluster_id)[0]
        socket, monitor = sockets.call(self._context, address, self._trust, key, self._dscp)
        call = Call(peer, index, address, key, socket, monitor)
        self.by_socket[socket] = self.by_monitor[monitor] = call
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return call

    def events(self, call: Call) -> Iterator[bool]:
        """Yield True for each time that a call has come to stand, False for each that it ended."""
        has_failed = False
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(call.monitor.recv_multipart(zmq.NOBLOCK))["event"]
                goes_on = event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_CONNECT_RETRIED)
                call.ended_at = None if goes_on else time.monotonic()
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    call.number = next(self._numbers)
                    yield True
                elif event == zmq.EVENT_DISCONNECTED:
                    yield False
                elif event == zmq.EVENT_CONNECT_RETRIED:
                    call.peer.trouble = call.peer.trouble or _NOBODY
                else:
                    is_auth = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                    call.peer.trouble = _NOT_TAKEN if is_auth else _NOT_KNOWN
                    has_failed = True
        if has_failed:
            self._try_next_key(call)

    def make_ended_ones_anew(self) -> None:
        """Call again where libzmq does not: also who has been given up, for a later process."""
        now = time.monotonic()
        for call in [call for call in self.by_socket.values() if call.has_ended(now)]:
            self.hang_up(call)
            again = self.call(call.peer, call.index, call.address, call.key)
            again.num_vain = 0 if call.number else min(call.num_vain + 1, _MOST_VAIN)

    def renew(self, peers: set[int] | None = None) -> None:
        """Call anew where a key is not one of the peer's any more, and all for None."""
        assert self._trust is not None
        for call in [*self.by_socket.values()]:
            keys = self._trust.keys_of(call.peer.cluster_id)
            if peers is None or (call.peer.cluster_id in peers and call.key not in keys):
                self.hang_up(call)
                if keys and call.peer.error is None:
                    self.call(call.peer, call.index, call.address)

    def call_anew(self, peer: Peer, tells: bool = False) -> bool:
        """End all calls to a peer and make them again; False if there are none.

        `tells` it so before, as far as it hears anything.
        """
        calls = [call for call in self.by_socket.values() if call.peer is peer]
        if calls and tells:
            peer.tell_of_renewal()
        for call in calls:
            self.hang_up(call, _TELL_MILLISECONDS if tells and not call.index else 0)
            self.call(peer, call.index, call.address, call.key)
        return bool(calls)

    def hang_up(self, call: Call, linger_milliseconds: int = 0) -> None:
        """End a call for good."""
        if call.ended_at is None or call.peer.is_over(call.index, call.socket):
            call.peer.close(call.index)  # else what stands was called from there
        del self.by_socket[call.socket], self.by_monitor[call.monitor]
        self._poller.unregister(call.socket)
        self._poller.unregister(call.monitor)
        call.socket.disable_monitor()
        call.monitor.close(0)
        call.socket.close(linger_milliseconds)

    def end(self, linger_milliseconds: int) -> None:
        """End all of them, within a time in which what was sent goes out."""
        for call in [*self.by_socket.values()]:
            self.hang_up(call, linger_milliseconds)

    def _try_next_key(self, call: Call) -> None:
        keys = [] if self._trust is None else [*self._trust.keys_of(call.peer.cluster_id)]
        if len(keys) > 1 or (keys and call.key not in keys):
            place = keys.index(call.key) + 1 if call.key in keys else 0
            self.hang_up(call)
            self.call(call.peer, call.index, call.address, keys[place % len(keys)])
