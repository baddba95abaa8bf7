"""What a caller says first, and so to which rank it is handed; nothing here touches a socket.

A generator asks for a number of bytes (`yield 10`) or says some (`yield b"..."`), and returns what
the caller wants. No more is read than is asked for: the rest belongs to whom it is handed to.

- **ZMTP**, what libzmq speaks (RFC 23). The 8 bytes of padding in its signature carry the length
  of the caller's routing id plus 1, by which old peers were understood; libzmq 4 still sends it
  (`routing_id` below, and a test). So a rank's *slot* goes before all that is encrypted.
- **SOCKS5** (RFC 1928): CONNECT, by name, without authentication. It is what gateways and relays
  speak to each other. (libzmq's own, ZMQ_SOCKS_PROXY, is not used: in 4.3.5 a connection refused by
  the proxy ends the process once its socket is closed, and a silent proxy is waited for forever.)
- **dsx-relay-1**, what a site says to a relay: `DSXR`, a kind, a length, JSON (`pack_message`).

BadGreeting says what did not fit, and holds the answer that is due, if one is.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, cast

NUM_SLOTS = 239
_UNIQUE_BYTES = 16  # of a routing id, before what tells the slot
_MOST_ID_BYTES = 255
_ZMTP_BYTES = 10
_SOCKS, _CONNECT, _BY_NAME = 5, 1, 3
_ADDRESS_BYTES = {1: 4, 4: 16}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
_MAGIC = b"DSXR"
MESSAGE_HEAD = struct.Struct(">4scH")
MOST_MESSAGE_BYTES = 32768
REGISTER, CHALLENGE, SIGNED, REGISTERED, REFUSED = b"R", b"C", b"S", b"K", b"N"
OPEN, TAKE, CANNOT, ALIVE = b"O", b"T", b"X", b"A"

JOINED, FAILED, NOT_ALLOWED, UNREACHABLE, NOT_THERE = 0, 1, 2, 4, 5  # SOCKS5's replies
_NOT_SERVED, _ADDRESS_NOT_SERVED = 7, 8


class BadGreeting(ValueError):
    """What does not fit; `answer` is what the caller is told before it is closed."""

    def __init__(self, text: str, answer: bytes = b"") -> None:
        super().__init__(text)
        self.answer = answer


@dataclass(frozen=True)
class ToSlot:
    """A caller of libzmq; `first` are bytes that the rank has to get."""

    slot: int
    first: bytes


@dataclass(frozen=True)
class ToName:
    """A caller by SOCKS5, who waits for a reply."""

    name: str


@dataclass(frozen=True)
class Message:
    """Of a site to its relay, or back. `raw` is the body as it was sent, which is signed."""

    kind: bytes
    raw: bytes

    def field(self, key: str, kind: type[Any]) -> Any:
        """Return a field of the body; BadGreeting if it is missing or of another type."""
        try:
            body: Any = json.loads(self.raw)
        except (ValueError, RecursionError):
            raise BadGreeting("a message that is no JSON") from None
        value = cast("dict[str, Any]", body).get(key) if isinstance(body, dict) else None
        if type(value) is not kind:
            raise BadGreeting(f"a message without {key}")
        return value


Wanted = ToSlot | ToName | Message
Greeting = Generator["int | bytes", bytes, Wanted]


def rank_name(member: str, rank: int) -> str:
    """Return what a rank is called for: `rank-3.site-a.dsx`."""
    return f"rank-{rank}.{member}.dsx"


def member_in(name: str) -> str | None:
    """Return the member in a rank's name, None if it is none."""
    found = re.fullmatch(r"rank-(?:0|[1-9]\d{0,6})\.([A-Za-z0-9][A-Za-z0-9_-]{0,31})\.dsx", name)
    return found[1] if found else None


def require_name(name: str) -> str:
    """Return what can be called for through SOCKS5, ValueError says what is allowed."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name={name[:80]!r} must be letters, digits, '.', '-' and '_', at most 200, such as "
            f"{rank_name('site-a', 3)!r}"
        )
    return name


def routing_id(slot: int) -> bytes:
    """Return a ROUTING_ID for a libzmq socket that calls the rank with a slot of a gateway.

    No other has it. The ROUTER that is called needs ROUTER_HANDOVER, as a caller that comes again
    may be faster than the end of its earlier connection.
    """
    if not 0 <= slot < NUM_SLOTS:
        raise ValueError(f"slot={slot} must be 0 to {NUM_SLOTS - 1}: one per rank of a host")
    return b"\1" + os.urandom(_UNIQUE_BYTES - 1 + slot)


def greet_zmtp_or_socks() -> Greeting:
    """Take a gateway's caller."""
    first = yield 1
    if first == b"\xff":
        return (yield from _zmtp(first))
    if first[0] == _SOCKS:
        return (yield from _socks())
    raise BadGreeting("neither libzmq's greeting nor SOCKS5")


def greet_relay() -> Greeting:
    """Take a relay's caller, or a site of its."""
    first = yield 1
    if first[0] == _SOCKS:
        return (yield from _socks())
    if first == _MAGIC[:1]:
        return (yield from read_message(first))
    raise BadGreeting("neither SOCKS5 nor a site's registration")


def _zmtp(first: bytes) -> Greeting:
    first += yield _ZMTP_BYTES - 1
    size = int.from_bytes(first[1:9], "big") - 1
    if first[9] & 1 == 0 or not _UNIQUE_BYTES <= size <= _MOST_ID_BYTES:
        raise BadGreeting("a libzmq caller that names no slot")
    return ToSlot(size - _UNIQUE_BYTES, first)


def _socks() -> Greeting:
    (num_methods,) = yield 1
    methods = (yield num_methods) if num_methods else b""
    if 0 not in methods:
        raise BadGreeting("SOCKS5 with authentication alone", b"\5\xff")
    yield b"\5\0"
    version, command, _, kind = yield 4
    if version != _SOCKS:
        raise BadGreeting("SOCKS5 with a request of another version")
    if command != _CONNECT:
        raise BadGreeting("SOCKS5 with another command than CONNECT", socks_reply(_NOT_SERVED))
    if kind != _BY_NAME:
        if kind in _ADDRESS_BYTES:
            yield _ADDRESS_BYTES[kind] + 2
        raise BadGreeting("SOCKS5 for an address", socks_reply(_ADDRESS_NOT_SERVED))
    (length,) = yield 1
    name = (yield length + 2)[:-2].decode("ascii", errors="replace")
    if not _NAME.fullmatch(name):
        raise BadGreeting("SOCKS5 for what is no name", socks_reply(NOT_ALLOWED))
    return ToName(name)


def socks_reply(code: int) -> bytes:
    """Return what a SOCKS5 caller is told."""
    return bytes((_SOCKS, code, 0, 1, 0, 0, 0, 0, 0, 0))


def ask_socks(name: str) -> Generator[int | bytes, bytes, int]:
    """Ask another gateway, or a relay, for a name; returns its reply's code."""
    yield b"\5\1\0"
    answer = yield 2
    if answer != b"\5\0":
        raise BadGreeting("it does not speak SOCKS5, or not without authentication")
    encoded = name.encode("ascii")
    yield b"\5\1\0\3" + bytes((len(encoded),)) + encoded + b"\0\1"
    version, code, _, kind = yield 4
    if version != _SOCKS or kind not in _ADDRESS_BYTES:
        raise BadGreeting("its reply is not SOCKS5's")
    yield _ADDRESS_BYTES[kind] + 2
    return code


def pack_message(kind: bytes, **body: object) -> bytes:
    """Return a message of a site or a relay as it is sent; ValueError if it is too long."""
    raw = json.dumps(body).encode()
    if len(raw) > MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(raw)} bytes; at most {MOST_MESSAGE_BYTES}")
    return MESSAGE_HEAD.pack(_MAGIC, kind, len(raw)) + raw


def read_message(first: bytes = b"") -> Generator[int | bytes, bytes, Message]:
    """Read one message of a site or a relay."""
    head = first + (yield MESSAGE_HEAD.size - len(first))
    magic, kind, length = MESSAGE_HEAD.unpack(head)
    if magic != _MAGIC:
        raise BadGreeting("no message of dsx-relay-1")
    if length > MOST_MESSAGE_BYTES:
        raise BadGreeting("a message that is too long")
    return Message(kind, (yield length) if length else b"")


def what_is_signed(nonce: bytes, raw: bytes) -> bytes:
    """Return what a site signs to register: the relay's nonce of 32 bytes, and its request."""
    return b"dsx-relay-1 registration\0" + nonce + raw
