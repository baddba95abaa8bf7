"""Ranks of libzmq for tests of what stands between them: one is called, others call, by CURVE."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

MILLISECONDS = 10_000


class Called:
    """A ROUTER that says back what it hears, to whoever has one of `allowed`, in its own thread."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.public, secret = zmq.curve_keypair()
        self.allowed: set[bytes] = set()
        self._door: Any = self.context.socket(zmq.REP)
        self._door.bind("inproc://zeromq.zap.01")
        self._router: Any = self.context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.curve_server = True
        self._router.curve_secretkey = secret
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"dsx")
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.RCVHWM, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self.port: int = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Called:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(10)
        self.context.destroy(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._door, zmq.POLLIN)
        while not self._ended.is_set():
            for ready, _ in poller.poll(50):
                if ready is self._door:
                    version, request, *_, key = self._door.recv_multipart()
                    status = b"200" if key in self.allowed else b"400"
                    self._door.send_multipart([version, request, status, b"", b"", b""])
                else:
                    identity, head, body = self._router.recv_multipart(copy=False)
                    answer = body if head.bytes == b"echo" else b"%d" % len(body)
                    self._router.send_multipart([identity, head, answer], copy=False)


class Calling:
    """A DEALER that calls a `Called` at a port; `identity` is its ROUTING_ID."""

    def __init__(self, whom: Called, port: int, identity: bytes, is_known: bool = True) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        public, secret = zmq.curve_keypair()
        if is_known:
            whom.allowed.add(z85.decode(public))
        self.socket: Any = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_serverkey = whom.public
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        if identity:
            self.socket.routing_id = identity
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self.monitor = self.socket.get_monitor_socket()
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> Calling:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.disable_monitor()
        self.context.destroy(0)

    def echoes(self, num_bytes: int = 1000, milliseconds: int = MILLISECONDS) -> bool:
        """Whether random bytes come back as they were sent."""
        body = os.urandom(num_bytes)
        if not self.socket.poll(milliseconds, zmq.POLLOUT):
            return False
        self.socket.send_multipart([b"echo", body])
        if not self.socket.poll(milliseconds):
            return False
        return self.socket.recv_multipart() == [b"echo", body]

    def waits_for(self, event: int, milliseconds: int = MILLISECONDS) -> bool:
        """Whether libzmq tells of an event in time."""
        while self.monitor.poll(milliseconds):
            if parse_monitor_message(self.monitor.recv_multipart())["event"] == event:
                return True
        return False


def ask(port: int, *said: bytes, reads: int = 1 << 16, seconds: float = 10.0) -> bytes:
    """Say something to a port, piece by piece, and return what comes until it is closed.

    An empty piece says that nothing more comes.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        heard = b""
        try:
            for piece in said:
                connection.sendall(piece) if piece else connection.shutdown(socket.SHUT_WR)
            while len(heard) < reads and (data := connection.recv(reads - len(heard))):
                heard += data
        except OSError as error:
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                raise
        return heard


def exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes of a connection, fewer if it ends before."""
    heard = b""
    while len(heard) < num_bytes and (data := connection.recv(num_bytes - len(heard))):
        heard += data
    return heard


def socks(name: str) -> tuple[bytes, bytes]:
    """Return what a SOCKS5 caller says for a name."""
    return b"\5\1\0", b"\5\1\0\3" + bytes((len(name),)) + name.encode() + b"\0\1"


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something comes true in time."""
    waits = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if holds():
            return True
        waits.wait(0.02)
    return holds()
