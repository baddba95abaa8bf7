"""Ways out: a port of this machine's own for each rank that is reached through a gateway or relay.

A rank calls that port as it calls any other; what it says goes to the other end, which is asked for
the rank's name by SOCKS5. So libzmq needs to know nothing of it, all waits have deadlines, and what
goes out is marked and paid for as all else.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable

from dsx.comm.links.entrance import Talk
from dsx.comm.links.event_loop import READ, EventLoop, look_up
from dsx.comm.links.gateway_table import Place
from dsx.comm.links.greetings import JOINED, NOT_ALLOWED, NOT_THERE, ask_socks
from dsx.comm.links.tcp import Dial, listen, prepare

_WORDS = {NOT_ALLOWED: "it does not know the name", NOT_THERE: "nobody listens there under it"}
_AT_ONCE = 64
Reached = Callable[[socket.socket | None, str], object]


class Reach:
    """Connects to a place by a deadline, and says what a generator wants there, if one is given.

    Calls `done` once, with the connection, or None and why not.
    """

    def __init__(
        self,
        loop: EventLoop,
        place: Place,
        name: str | None,
        seconds: float,
        dscp: int | None,
        done: Reached,
    ) -> None:
        self._loop, self._place, self._name, self._done = loop, place, name, done
        self._seconds, self._dscp = seconds, dscp
        self._is_over = False
        self._dial: Dial | None = None
        self._talk: Talk | None = None
        self._connection: socket.socket | None = None
        self._timer = loop.after(seconds, lambda: self._fail("no answer in time"))
        look_up(loop, place.host, place.port, self._found)

    def stop(self) -> None:
        """Give up, and call nobody."""
        self._done = _nobody
        self._fail("stopped")

    def _found(self, found: list[tuple[int, tuple[object, ...]]] | OSError) -> None:
        if self._is_over:
            return
        if isinstance(found, OSError):
            self._fail(str(found.strerror))
        else:
            self._dial = Dial(self._loop, found, self._seconds, self._dialled, self._dscp)

    def _dialled(self, connection: socket.socket | None, error: OSError | None) -> None:
        if connection is None:
            self._fail(error.strerror if error is not None and error.strerror else "unreachable")
            return
        self._connection = connection
        if self._name is None:
            self._succeed()
        else:
            self._talk = Talk(self._loop, connection, ask_socks(self._name), self._answered)

    def _answered(self, code: int | None, error: Exception | None) -> None:
        if code == JOINED:
            self._succeed()
        elif code is not None:
            self._fail(_WORDS.get(code, f"it refuses, SOCKS5's code {code}"))
        else:
            self._fail(str(error))

    def _succeed(self) -> None:
        self._is_over = True
        self._timer.cancel()
        self._done(self._connection, "")

    def _fail(self, why: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._timer.cancel()
        if self._dial is not None:
            self._dial.stop()
        if self._talk is not None:
            self._talk.stop()
        if self._connection is not None:
            self._connection.close()
        self._done(None, why)


def _nobody(connection: socket.socket | None, why: str) -> None:
    """After `stop`, nobody is told."""


class Way:
    """A port on loopback for one name; `join` gets the outside and the inside connection."""

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        place: Place,
        seconds: float,
        dscp: int | None,
        may_join: Callable[[], bool],
        join: Callable[[socket.socket, socket.socket], object],
    ) -> None:
        self.name, self.place = name, place
        self.failures: Counter[str] = Counter()
        self._loop, self._seconds, self._dscp = loop, seconds, dscp
        self._may_join, self._join = may_join, join
        self._reaching: dict[Reach, socket.socket] = {}
        self._listener = listen("127.0.0.1", 0, None)
        self.port: int = self._listener.getsockname()[1]
        loop.watch(self._listener.fileno(), READ, self._accept)

    @property
    def num_open(self) -> int:
        """Return how many callers wait for the other end."""
        return len(self._reaching)

    def close(self) -> None:
        """Close the port, and let go who waits. What is joined stays."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for reach, inside in [*self._reaching.items()]:
            reach.stop()
            inside.close()
        self._reaching.clear()

    def _accept(self, events: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                inside, _ = self._listener.accept()
                prepare(inside)
            except OSError:
                return
            if not self._may_join():
                self.failures["too many connections"] += 1
                inside.close()
                continue
            self._reach(inside)

    def _reach(self, inside: socket.socket) -> None:
        started: list[Reach] = []

        def done(outside: socket.socket | None, why: str) -> None:
            if started:
                self._reaching.pop(started[0], None)
            if outside is None:
                self.failures[f"{self.place}: {why}"] += 1
                inside.close()
            else:
                self._join(outside, inside)

        reach = Reach(self._loop, self.place, self.name, self._seconds, self._dscp, done)
        started.append(reach)
        self._reaching[reach] = inside
