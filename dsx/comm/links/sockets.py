"""libzmq's sockets, set as links need them: keys, limits, no lingering, and who is let in.

libzmq encrypts in a thread of its own, outside the interpreter's lock. A listening socket lets in
whoever holds the key of a member (the door answers libzmq's question, RFC 27), and says with every
message which member that was; a calling one sends nothing before the other side has proved its key.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq
from zmq.utils import z85

from dsx.comm.address import bracketed
from dsx.comm.links.frames import MOST_BODY_BYTES
from dsx.comm.links.greetings import routing_id

_HANDSHAKE_MILLISECONDS = 20_000  # a host with too much to do has taken more than 5000
_RECONNECT_MILLISECONDS = 50
_MOST_RECONNECT_MILLISECONDS = 1000
_KEEPALIVE_SECONDS = 5
_UNANSWERED_MILLISECONDS = 12_000  # of TCP: then a connection ends, and is opened anew
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_DOOR = "inproc://zeromq.zap.01"


class Trust(Protocol):
    """The own key, and whose others are; keys in the 40 characters of Z85."""

    @property
    def public_key(self) -> bytes:
        """Of this member."""
        ...

    @property
    def secret_key(self) -> bytes:
        """Of this member."""
        ...

    def cluster_of(self, public_key: bytes) -> int | None:
        """Return the cluster whose key it is, of 32 bytes; None for nobody's, or a revoked one."""
        ...

    def keys_of(self, cluster_id: int) -> Sequence[bytes]:
        """Return the public keys a cluster may have now, in the order to try them."""
        ...

    def reload(self) -> set[int]:
        """Return the clusters whose keys have changed since the last time."""
        ...


class Door:
    """Answers libzmq's question who may come in; in the thread that polls `socket`."""

    def __init__(self, context: zmq.Context[Any], trust: Trust, refused: Callable[[str], object]):
        self._trust = trust
        self._refused = refused
        self.socket: Any = context.socket(zmq.REP)
        self.socket.bind(_DOOR)

    def answer(self) -> None:
        """Answer one question: a member's key is let in, any other is not."""
        version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart()
        is_key = mechanism == b"CURVE" and len(credentials) == 1
        cluster = self._trust.cluster_of(credentials[0]) if is_key else None
        if cluster is None:
            self._refused(address.decode(errors="replace"))
            verdict = [b"400", b"not a member", b"", b""]
        else:
            verdict = [b"200", b"", z85.encode(credentials[0]), b""]  # whose it is may change
        self.socket.send_multipart([version, request, *verdict])


def listen(
    context: zmq.Context[Any], host: str, port: int, trust: Trust | None, dscp: int = 0
) -> tuple[Any, int]:
    """Return a socket that others call, and its port, a free one for 0. OSError if it is taken."""
    socket = _socket(context, zmq.ROUTER, dscp)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to who has gone is an error
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who comes again may be ahead of its own end
    if trust is not None:
        socket.curve_server = True
        socket.curve_secretkey = trust.secret_key
        socket.setsockopt(zmq.ZAP_DOMAIN, b"dsx")
    try:
        if port:
            socket.bind(f"tcp://{bracketed(host)}:{port}")
        else:
            port = socket.bind_to_random_port(f"tcp://{bracketed(host)}")
    except zmq.ZMQError as error:
        socket.close(0)
        number = error.errno or errno.EADDRINUSE
        raise OSError(number, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return socket, port


def call(
    context: zmq.Context[Any],
    address: tuple[str, int],
    trust: Trust | None,
    key: bytes,
    dscp: int = 0,
) -> tuple[Any, Any]:
    """Return a socket that calls `host:port`, again whenever it is cut off, and one that tells of
    its connections; `key` is theirs. By the slot a gateway there knows which rank is meant.
    """  # fmt: skip
    place, slot = address
    socket = _socket(context, zmq.DEALER, dscp)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing lies waiting for a connection
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MILLISECONDS)
    if trust is not None:
        socket.curve_serverkey = key
        socket.curve_publickey = trust.public_key
        socket.curve_secretkey = trust.secret_key
    monitor = socket.get_monitor_socket(_EVENTS)  # first: what happens before is not told
    socket.routing_id = routing_id(slot)
    socket.connect(f"tcp://{place}")
    return socket, monitor


def key_of_text(key: bytes) -> bytes:
    """Return a key's 32 bytes, from the 40 characters of Z85."""
    return z85.decode(key)


def _socket(context: zmq.Context[Any], kind: int, dscp: int) -> Any:
    socket: Any = context.socket(kind)
    socket.setsockopt(zmq.TOS, dscp << 2)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # what is idle for long is forgotten by NATs
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_MAXRT, _UNANSWERED_MILLISECONDS)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, 0)  # what waits is bounded by what is not acknowledged
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BODY_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
    return socket
