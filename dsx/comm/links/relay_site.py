"""A site that can only call out, at its relay: it registers, and calls back for each caller.

One connection stands, over which the relay says who is called; for each call the site opens another
one to the relay, with the token that it was told. A cut connection is opened again, later with each
try. The relay's challenge is signed by whoever has the key (`sign`); nothing here holds it.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Generator
from typing import Any

from dsx.comm.links import greetings
from dsx.comm.links.entrance import Talk
from dsx.comm.links.event_loop import EventLoop, Timer
from dsx.comm.links.gateway_table import Rank, RelayPlace
from dsx.comm.links.greetings import (
    BadGreeting,
    Message,
    pack_message,
    read_message,
    what_is_signed,
)
from dsx.comm.links.ways import Reach

SILENT_SECONDS = 30.0
ALIVE_SECONDS = 8.0
NONCE_BYTES = 32
_REGISTER_SECONDS = 10.0
_FIRST_WAIT_SECONDS, _MOST_WAIT_SECONDS = 0.25, 10.0
Sign = Callable[[bytes, Callable[[bytes], object]], object]
Join = Callable[[socket.socket, socket.socket], object]
Say = Callable[[str, str], object]


class Registration:
    """One relay for as long as it is wanted; `say` gets ("registered" or "unregistered", why)."""

    def __init__(
        self,
        loop: EventLoop,
        relay: RelayPlace,
        ranks: dict[str, Rank],
        sign: Sign,
        join: Join,
        say: Say,
        dscp: int | None,
        call_seconds: float,
    ) -> None:
        self.relay, self.ranks = relay, ranks
        self._loop, self._sign, self._join, self._say = loop, sign, join, say
        self._dscp, self._call_seconds = dscp, call_seconds
        self._wait_seconds = _FIRST_WAIT_SECONDS
        self._connection: socket.socket | None = None
        self._reach: Reach | None = None
        self._talk: Talk | None = None
        self._timers: dict[str, Timer] = {}
        self._calls: set[Reach] = set()
        self._is_wanted = True
        self._is_registered = False
        self._raw = pack_message(greetings.REGISTER, member=relay.member, names=sorted(ranks))
        self._dial()

    def stop(self) -> None:
        """Leave the relay. What is joined stays."""
        self._is_wanted = False
        if self._reach is not None:
            self._reach.stop()
        for call in [*self._calls]:
            call.stop()
        self._drop("stopped")

    def look(self) -> None:
        """Say something, as a line that was cut is only found out by that."""
        if self._is_registered:
            self._send(pack_message(greetings.ALIVE))

    def _dial(self) -> None:
        place = self.relay.place
        self._reach = Reach(
            self._loop, place, None, _REGISTER_SECONDS, self._dscp, self._reached
        )  # fmt: skip

    def _reached(self, connection: socket.socket | None, why: str) -> None:
        self._reach = None
        if connection is None:
            self._again(why)
            return
        self._connection = connection
        self._due("register", _REGISTER_SECONDS, "the relay did not answer in time")
        self._talk = Talk(self._loop, connection, self._ask(), self._challenged)

    def _ask(self) -> Generator[int | bytes, bytes, Message]:
        yield self._raw
        return (yield from read_message())

    def _challenged(self, message: Message | None, error: Exception | None) -> None:
        try:
            nonce = bytes.fromhex(_expect(message, error, greetings.CHALLENGE).field("nonce", str))
        except (ValueError, OSError) as problem:
            self._drop(str(problem))
            return
        if len(nonce) != NONCE_BYTES:
            self._drop(f"the relay's nonce has {len(nonce)} bytes, not {NONCE_BYTES}")
            return
        connection, raw = self._connection, self._raw[greetings.MESSAGE_HEAD.size :]

        def signed(signature: bytes) -> None:
            if connection is not None and self._connection is connection:
                words = _say_signed(signature)
                self._talk = Talk(self._loop, connection, words, self._accepted)

        self._sign(what_is_signed(nonce, raw), signed)

    def _accepted(self, message: Message | None, error: Exception | None) -> None:
        try:
            _expect(message, error, greetings.REGISTERED)
        except (ValueError, OSError) as problem:
            self._drop(str(problem))
            return
        self._cancel("register")
        self._wait_seconds = _FIRST_WAIT_SECONDS
        self._is_registered = True
        self._say("registered", str(self.relay.place))
        self._listen()

    def _listen(self) -> None:
        if self._connection is not None:
            self._due("silent", SILENT_SECONDS, f"the relay was silent for {SILENT_SECONDS:.0f} s")
            self._talk = Talk(self._loop, self._connection, read_message(), self._told)

    def _told(self, message: Message | None, error: Exception | None) -> None:
        if message is None:
            self._drop(str(error))
            return
        try:
            if message.kind == greetings.OPEN:
                self._call_back(message.field("name", str), message.field("token", str))
            elif message.kind == greetings.ALIVE:
                self._send(pack_message(greetings.ALIVE))
            else:
                raise BadGreeting("a message that no relay sends")
        except BadGreeting as problem:
            self._drop(str(problem))
            return
        self._listen()

    def _call_back(self, name: str, token: str) -> None:
        """Connect to the rank, then to the relay, and join the two."""
        rank = self.ranks.get(name)
        if rank is None:
            self._send(pack_message(greetings.CANNOT, token=token, why="it has no such rank"))
            return

        def to_rank(inside: socket.socket | None, why: str) -> None:
            self._calls.discard(first)
            if inside is None:
                self._send(
                    pack_message(greetings.CANNOT, token=token, why=f"the rank: {why}"[:200])
                )
                return

            def to_relay(outside: socket.socket | None, why: str) -> None:
                self._calls.discard(second)
                if outside is None:
                    inside.close()
                    return
                try:
                    outside.send(pack_message(greetings.TAKE, token=token))
                except OSError:
                    inside.close()
                    outside.close()
                else:
                    self._join(outside, inside)

            seconds = self._call_seconds
            second = Reach(self._loop, self.relay.place, None, seconds, self._dscp, to_relay)
            self._calls.add(second)

        first = Reach(self._loop, rank.place, None, self._call_seconds, None, to_rank)
        self._calls.add(first)

    def _send(self, data: bytes) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # reading tells of a broken connection
                self._connection.send(data)

    def _drop(self, why: str) -> None:
        """Close the connection, and open it again where it is wanted."""
        for what in [*self._timers]:
            self._cancel(what)
        if self._talk is not None:
            self._talk.stop()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._again(why)

    def _again(self, why: str) -> None:
        if not self._is_wanted:
            return
        self._say("unregistered", f"{self.relay.place}: {why}")
        self._is_registered = False
        wait, self._wait_seconds = (
            self._wait_seconds,
            min(2 * self._wait_seconds, _MOST_WAIT_SECONDS),
        )
        self._loop.after(wait * random.uniform(0.5, 1.0), self._dial_if_wanted)

    def _dial_if_wanted(self) -> None:
        if self._is_wanted:
            self._dial()

    def _due(self, what: str, seconds: float, why: str) -> None:
        self._cancel(what)
        self._timers[what] = self._loop.after(seconds, lambda: self._drop(why))

    def _cancel(self, what: str) -> None:
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()


def _say_signed(signature: bytes) -> Generator[int | bytes, bytes, Message]:
    yield pack_message(greetings.SIGNED, signature=signature.hex())
    return (yield from read_message())


def _expect(message: Message | None, error: Exception | None, kind: bytes) -> Message:
    """Return a message of a kind; ValueError or OSError for all else, with the relay's words."""
    if message is None:
        raise OSError(0, str(error))
    if message.kind == greetings.REFUSED:
        raise ValueError(f"the relay refuses: {str(message.field('why', str))[:200]}")
    if message.kind != kind:
        raise ValueError("the relay's answer is not the one that is due")
    return message


def read_names(message: Message) -> tuple[str, list[str]]:
    """Return the member and the names of a request to register; BadGreeting if it is none."""
    member: str = message.field("member", str)
    names: list[Any] = message.field("names", list)
    if not all(isinstance(name, str) for name in names):
        raise BadGreeting("a registration with names that are none")
    return member, names
