"""TCP connections as gateways and relays want them: none of them waits, dead ones are noticed."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable

from dsx.comm.links.event_loop import WRITE, EventLoop

_BACKLOG = 1024
_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))  # silent for 30 s: gone
_USER_TIMEOUT = 18  # TCP_USER_TIMEOUT, which the module socket does not always have
_UNACKNOWLEDGED_MILLISECONDS = 120_000


def listen(host: str, port: int, dscp: int | None) -> socket.socket:
    """Return a listener; `::` takes IPv4, too. OSError names host, port and what is wrong."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6 and host == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _mark(listener, dscp)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else 0
        text = f"cannot listen on {host}:{port}: "
        if number == errno.EADDRINUSE:
            from dsx.comm.links.port_owner import who_listens

            text += f"{who_listens(port)} does; choose another port, or end that"
        else:
            text += f"{getattr(error, 'strerror', None) or error}; the host is one of this machine"
        raise OSError(number or errno.EINVAL, text) from None
    return listener


def prepare(connection: socket.socket, dscp: int | None = None) -> None:
    """Set a TCP socket as all are here: no waiting, no delay, and a dead peer is noticed."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, _UNACKNOWLEDGED_MILLISECONDS)
    _mark(connection, dscp)


def _mark(connection: socket.socket, dscp: int | None) -> None:
    if dscp is None:
        return
    if connection.family == socket.AF_INET6:
        connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
        with contextlib.suppress(OSError):  # it carries IPv6 alone
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
    else:
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


class Dial:
    """Opens a connection to one of some addresses by a deadline; calls `done` once."""

    def __init__(
        self,
        loop: EventLoop,
        addresses: list[tuple[int, tuple[object, ...]]],
        seconds: float,
        done: Callable[[socket.socket | None, OSError | None], object],
        dscp: int | None = None,
    ) -> None:
        self._loop, self._left, self._done, self._dscp = loop, [*addresses], done, dscp
        self._connection: socket.socket | None = None
        self._error = OSError(errno.EADDRNOTAVAIL, "no address")
        self._timer = loop.after(seconds, self._too_late)
        loop.post(self._next)

    def stop(self) -> None:
        """Give up, and call nobody."""
        self._timer.cancel()
        self._left = []
        self._done = _nobody
        self._drop()

    def _next(self) -> None:
        while self._left:
            family, address = self._left.pop(0)
            try:
                connection = self._connection = socket.socket(family, socket.SOCK_STREAM)
                prepare(connection, self._dscp)
                number = connection.connect_ex(address)
                if number not in (0, errno.EINPROGRESS):
                    raise OSError(number, os.strerror(number))
            except OSError as error:
                self._error = error
                self._drop()
                continue
            self._loop.watch(connection.fileno(), WRITE, self._look)
            return
        self._finish(None, self._error)

    def _look(self, events: int) -> None:
        assert self._connection is not None
        number = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._error = OSError(number, os.strerror(number))
            self._drop()
            self._next()
            return
        connection, self._connection = self._connection, None
        self._loop.forget(connection.fileno())
        self._finish(connection, None)

    def _drop(self) -> None:
        if self._connection is not None:
            self._loop.forget(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _too_late(self) -> None:
        self._drop()
        self._finish(None, OSError(errno.ETIMEDOUT, "no answer in time"))

    def _finish(self, connection: socket.socket | None, error: OSError | None) -> None:
        self._timer.cancel()
        done, self._done = self._done, _nobody
        done(connection, error)


def _nobody(connection: socket.socket | None, error: OSError | None) -> None:
    """After the first, nobody is told."""
