"""Connections that have come in and are not joined yet: what they say, and by when.

Of those that have not yet said what they want, the oldest is
closed when there are too many: who means it has said so in a round trip.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from dsx.comm.links.event_loop import READ, EventLoop, Timer
from dsx.comm.links.greetings import BadGreeting, Greeting, Wanted
from dsx.comm.links.tcp import prepare

_AT_ONCE = 64  # taken from a listener before others have their turn
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """Of connections that are let in, and how long they may take to say what they want.

    `dscp`: 0 to 63, the mark on all that is sent outside; None leaves it to the system.
    """

    most_connections: int = 512
    most_greeting: int = 512
    greeting_seconds: float = 5.0
    dscp: int | None = None

    def __post_init__(self) -> None:
        if self.most_connections < 1 or self.most_greeting < 1:
            raise ValueError(
                f"most_connections={self.most_connections} and most_greeting={self.most_greeting} "
                "must be at least 1"
            )
        if not self.greeting_seconds > 0:
            raise ValueError(f"greeting_seconds={self.greeting_seconds} must be more than 0")
        if self.dscp is not None and not 0 <= self.dscp <= 63:
            raise ValueError(f"dscp={self.dscp} must be 0 to 63, such as 8 (CS1, less than others)")

    @property
    def most_files(self) -> int:
        """Return how many files are open at most: two sockets and two pipes per connection."""
        return 6 * self.most_connections + self.most_greeting + 256


class Talk:
    """Says and reads on a connection what a generator wants, and calls `done` with its result.

    Or with why it did not get there. The connection is then watched no more, and still open.
    """

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        words: Generator[int | bytes, bytes, Any],
        done: Callable[[Any | None, Exception | None], object],
    ) -> None:
        self._loop, self._connection, self._words, self._done = loop, connection, words, done
        self._wanted: int | bytes = next(words)
        self._read = bytearray()
        self._is_over = False
        loop.watch(connection.fileno(), READ, self._look)
        loop.post(self._go_on)  # so that nobody is called before this is there

    def stop(self) -> None:
        """Watch it no more, and call nobody."""
        if not self._is_over:
            self._is_over = True
            self._loop.forget(self._connection.fileno())

    def _look(self, events: int) -> None:
        self._go_on()

    def _go_on(self) -> None:
        """Go as far as it goes without waiting."""
        if self._is_over:
            return
        try:
            while True:
                if isinstance(self._wanted, bytes):
                    if self._connection.send(self._wanted) != len(self._wanted):
                        raise OSError(errno.ENOBUFS, "it does not take what is short")
                    self._wanted = self._words.send(b"")
                    continue
                data = self._connection.recv(self._wanted - len(self._read))
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "it has closed the connection")
                self._read += data
                if len(self._read) == self._wanted:
                    read, self._read = bytes(self._read), bytearray()
                    self._wanted = self._words.send(read)
        except BlockingIOError:
            return
        except StopIteration as end:
            self._finish(end.value, None)
        except (OSError, BadGreeting) as error:
            self._finish(None, error)

    def _finish(self, value: Any | None, error: Exception | None) -> None:
        self.stop()
        self._done(value, error)


class Caller:
    """A connection that has come in and is not joined yet. `host` is where it comes from."""

    def __init__(self, entrance: Entrance, connection: socket.socket, host: str) -> None:
        self._entrance, self.connection, self.host = entrance, connection, host
        self.timer: Timer | None = None
        self.talk: Talk | None = None
        self.is_open = True

    def take(self) -> socket.socket:
        """Return its socket, for whoever has it from now on."""
        self._entrance.forget(self)
        return self.connection

    def refuse(self, why: str, answer: bytes = b"") -> None:
        """Say the answer, as far as it is taken, count why and close."""
        if self.is_open:
            self._entrance.forget(self)
            self._entrance.counts[why] += 1
            with contextlib.suppress(OSError):
                if answer:
                    self.connection.send(answer)
            self.connection.close()


class Entrance:
    """A listener and those that have come in, until `wanted` is called with what they want.

    `counts` says why others were refused.
    """

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        limits: Limits,
        greeting: Callable[[], Greeting],
        wanted: Callable[[Caller, Wanted], object],
    ) -> None:
        self._loop, self._listener, self._limits = loop, listener, limits
        self._greeting, self._wanted = greeting, wanted
        self._greeting_now: dict[Caller, None] = {}  # the oldest first
        self._all: dict[Caller, None] = {}
        self.counts: Counter[str] = Counter()
        loop.watch(listener.fileno(), READ, self._accept)

    @property
    def num_open(self) -> int:
        """Return how many are not joined yet."""
        return len(self._all)

    def forget(self, caller: Caller) -> None:
        """Let a caller go, to be joined or closed."""
        caller.is_open = False
        if caller.talk is not None:
            caller.talk.stop()
        if caller.timer is not None:
            caller.timer.cancel()
        self._greeting_now.pop(caller, None)
        self._all.pop(caller, None)

    def close(self) -> None:
        """End the listener and all that have not been joined."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for caller in [*self._all]:
            caller.refuse("closed with the gateway")

    def _accept(self, events: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no files, no memory, or it has gone meanwhile
                self.counts[f"not accepted: {os.strerror(error.errno or 0)}"] += 1
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    number = self._listener.fileno()
                    self._loop.change(number, 0)
                    self._loop.after(_PAUSE_SECONDS, lambda n=number: self._resume(n))
                return
            self._take(connection, str(address[0]))

    def _resume(self, number: int) -> None:
        if self._listener.fileno() == number:
            self._loop.change(number, READ)

    def _take(self, connection: socket.socket, host: str) -> None:
        caller = Caller(self, connection, host)
        try:
            prepare(connection, self._limits.dscp)
        except OSError:  # reset before it was looked at
            connection.close()
            return
        if len(self._greeting_now) >= self._limits.most_greeting:
            next(iter(self._greeting_now)).refuse("too many that say nothing: the oldest")
        self._greeting_now[caller] = self._all[caller] = None
        caller.timer = self._loop.after(
            self._limits.greeting_seconds, lambda: caller.refuse("not joined in time")
        )
        caller.talk = Talk(
            self._loop, connection, self._greeting(), lambda w, e: self._said(caller, w, e)
        )

    def _said(self, caller: Caller, wanted: Wanted | None, error: Exception | None) -> None:
        self._greeting_now.pop(caller, None)
        if isinstance(error, BadGreeting):
            caller.refuse(str(error), error.answer)
        elif error is not None or wanted is None:
            caller.refuse("closed before it said what it wants")
        else:
            self._wanted(caller, wanted)
