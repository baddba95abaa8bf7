"""Those who call here: the socket that they call, and whose connection each of them is.

libzmq says with every message from whom it is, and of a connection that has ended nothing but its
descriptor, on another socket. A greeting comes by a descriptor, too: so it is known at once whose
connection has ended, also while nothing is sent there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from dsx.comm.links import sockets
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.peer import Peer

_PORT_SECONDS = 5.0


@dataclass(frozen=True)
class Caller:
    """One who greets: libzmq's name for the connection, its descriptor, the key (32 bytes)."""

    identity: bytes
    descriptor: int
    key: bytes | None


class Callers:
    """A link's; its sockets are in `poller`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller,
        trust: sockets.Trust | None,
        options: LinkOptions,
    ) -> None:
        """Listen; OSError if the port is taken."""
        self._context, self._poller, self._trust = context, poller, trust
        self._options = options
        self._routes: dict[bytes, tuple[Peer, int]] = {}  # by libzmq's name for a connection
        self._identities: dict[int, bytes] = {}  # by descriptor
        self._ended: list[bytes] = []  # what they have sent before may wait to be read
        self._listen(options.port)

    def _listen(self, port: int) -> None:
        host, dscp = self._options.host, self._options.dscp
        self.socket, self.port = sockets.listen(self._context, host, port, self._trust, dscp)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self.monitor, zmq.POLLIN)

    def listen_again(self) -> None:
        """End all connections, and listen at the same port, which libzmq frees a moment later."""
        self._poller.unregister(self.socket)
        self._poller.unregister(self.monitor)
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
        for peer, index in self._routes.values():
            peer.close(index)
        self._routes.clear()
        self._identities.clear()
        self._ended.clear()
        until = time.monotonic() + _PORT_SECONDS
        while True:
            try:
                return self._listen(self.port)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def frames(self, most: int) -> Iterator[tuple[bytes, list[Any]]]:
        """Yield what has come, at most so many messages: by whose connection, and the parts."""
        for _ in range(most):
            try:
                identity, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield identity.bytes, parts

    def whose(self, identity: bytes) -> tuple[Peer, int] | None:
        """Return the peer, and which of its connections it is; None before it has greeted."""
        return self._routes.get(identity)

    def take(self, peer: Peer, index: int, caller: Caller) -> None:
        """Note whose connection it is from now on, in place of an earlier one."""
        self.take_events()  # what is told of this descriptor until now is of one before
        before = {i for i, to in self._routes.items() if to == (peer, index)}
        self._forget(before | {caller.identity})
        self._routes[caller.identity] = (peer, index)
        self._identities[caller.descriptor] = caller.identity

    def forget(self, peer: Peer) -> None:
        """Let go what a process of before has called by."""
        self._forget({identity for identity, to in self._routes.items() if to[0] is peer})

    def close_ended(self) -> None:
        """Have peers close the connections that have ended; once all that has come is taken."""
        if self._ended and not self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            for identity in self._ended:
                peer, index = self._routes.pop(identity)
                peer.close(index)
            self._ended.clear()

    def take_events(self) -> None:
        """Take which connections have ended, as `monitor` tells."""
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
                identity = self._identities.pop(event["value"], None)
                if identity is not None:
                    self._ended.append(identity)

    def _forget(self, identities: set[bytes]) -> None:
        for identity in identities:
            self._routes.pop(identity, None)
        self._identities = {d: i for d, i in self._identities.items() if i not in identities}
        self._ended = [identity for identity in self._ended if identity not in identities]
