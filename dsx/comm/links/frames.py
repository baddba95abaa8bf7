"""What travels on a link: a head, which says what it is, and a body that it bounds.

A head that does not fit (another version, an unknown kind, a length that is not the body's, a
sender that is not the connection's) makes the frame one that is dropped, counted and named.

Numbers that are mostly small take a byte for each seven bits; a short body follows its head in one
part of a libzmq message, a long one is a part of its own, which libzmq takes without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

VERSION = 3
CHUNK_BYTES = 1 << 19  # of a message in one frame: what others wait for on a line, at most
JOINED_BYTES = 1 << 16  # of a body that goes in one part with its head
MOST_BODY_BYTES = 1 << 22  # of anything
MOST_MESSAGE_BYTES = CHUNK_BYTES << 32  # an acknowledgement has 32 bits for a chunk's number
HELLO, DATA, ACKS, READY, PROBE, ASK, ANSWER, CLOSED, AGAIN = range(1, 10)
BY_KEY = (1 << 16) - 1  # as a sender: whose key it is, of a tool that knows no cluster's number
_KINDS = range(HELLO, AGAIN + 1)
_FIXED = struct.Struct("<BBHQ")  # version, kind, sender, lane
_BITS = (32, 64, 32, 32, 64, 64, 64)  # of bytes of the body, tag, number, attempt, serial, start,
# and total, which follow
_SERIAL_BITS, _CHUNK_BITS = 65, 33  # of an acknowledgement: a signed difference; and a flag


class BadFrame(ValueError):
    """What came is no frame of this version; the text says in which way."""


def lane_of(name: str) -> int:
    """Return the number that stands for a lane: eight bytes of its name's hash."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Key:
    """Which message: the `number`-th one with a `tag` on a lane, from one rank to another."""

    lane: int
    tag: int
    number: int


@dataclass(frozen=True)
class Frame:
    """A head. `serial` counts the messages of a sender to this peer; `start` and `total` are in
    bytes of the message, of which the body is a part.
    """  # fmt: skip

    kind: int
    sender: int  # id of a cluster
    key: Key = Key(0, 0, 0)
    attempt: int = 0
    serial: int = 0
    start: int = 0
    total: int = 0

    def pack(self, body_bytes: int) -> bytes:
        """Return the head's bytes, for a body of so many."""
        key = self.key
        head = bytearray(_FIXED.pack(VERSION, self.kind, self.sender, key.lane))
        numbers = (key.number, self.attempt, self.serial, self.start, self.total)
        for value in (body_bytes, _unsigned(key.tag), *numbers):
            _append(head, value)
        return bytes(head)

    @classmethod
    def read(cls, head: bytes | memoryview, body_bytes: int) -> Frame:
        """Read a head that came with a body of so many bytes; BadFrame if it is not one."""
        frame, length, bounded = cls._read(head)
        if length != len(head):
            raise BadFrame(f"a head of {length} bytes, and {len(head) - length} behind it")
        _require_bytes(frame, bounded, body_bytes)
        return frame

    @classmethod
    def of(cls, parts: Sequence[memoryview]) -> tuple[Frame, memoryview]:
        """Read a message of libzmq, one part or two; BadFrame if it is no frame."""
        if len(parts) == 1:
            return cls.split(parts[0])
        if len(parts) != 2:
            raise BadFrame(f"a message of {len(parts)} parts")
        return cls.read(parts[0], len(parts[1])), parts[1]

    @classmethod
    def split(cls, part: memoryview) -> tuple[Frame, memoryview]:
        """Read a head, and return the body that follows it in the same part; BadFrame."""
        frame, length, bounded = cls._read(part)
        _require_bytes(frame, bounded, len(part) - length)
        return frame, part[length:]

    @classmethod
    def _read(cls, part: bytes | memoryview) -> tuple[Frame, int, int]:
        """Return a head, its length, and that of the body, as it says."""
        if len(part) < _FIXED.size:
            raise BadFrame("a head that is cut short")
        version, kind, sender, lane = _FIXED.unpack_from(part)
        if version != VERSION:
            raise BadFrame(f"version {version} instead of {VERSION}")
        if kind not in _KINDS:
            raise BadFrame(f"kind {kind}")
        at, values = _FIXED.size, list[int]()
        for bits in _BITS:
            value, at = _take(part, at, bits)
            values.append(value)
        body_bytes, tag, number, attempt, serial, start, total = values
        key = Key(lane, _signed(tag), number)
        return cls(kind, sender, key, attempt, serial, start, total), at, body_bytes


def _require_bytes(frame: Frame, length: int, body_bytes: int) -> None:
    """Raise BadFrame for a body that is not of the `length` that its head says."""
    start, total = frame.start, frame.total
    if length != body_bytes or length > MOST_BODY_BYTES:
        raise BadFrame(f"{body_bytes} bytes where the head says {length}")
    if frame.kind == DATA and not (start < total and 0 < length <= total - start):
        raise BadFrame(f"bytes {start} to {start + length} of {total}")
    if frame.kind == DATA and total > MOST_MESSAGE_BYTES:
        raise BadFrame(f"a message of {total} bytes, more than {MOST_MESSAGE_BYTES}")


@dataclass(frozen=True)
class Ack:
    """That a chunk has come; `is_awaited` says that its message has a place there."""

    serial: int
    chunk: int
    is_awaited: bool


def pack_acks(acks: Iterable[Ack]) -> bytes:
    """Return the body of an ACKS frame: serials as differences, two bytes for most of them."""
    body, before = bytearray(), 0
    for ack in acks:
        _append(body, _unsigned(ack.serial - before))
        _append(body, ack.chunk << 1 | ack.is_awaited)
        before = ack.serial
    return bytes(body)


def read_acks(body: bytes | memoryview) -> list[Ack]:
    """Read the body of an ACKS frame; BadFrame if it is not one."""
    acks, at, serial = list[Ack](), 0, 0
    while at < len(body):
        difference, at = _take(body, at, _SERIAL_BITS)
        chunk, at = _take(body, at, _CHUNK_BITS)
        serial += _signed(difference)
        if not 0 <= serial < 1 << 64:
            raise BadFrame(f"an acknowledgement of message {serial}")
        acks.append(Ack(serial, chunk >> 1, bool(chunk & 1)))
    return acks


def _append(to: bytearray, value: int) -> None:
    """Append a number, seven bits to a byte, the lowest first."""
    while value > 0x7F:
        to.append(value & 0x7F | 0x80)
        value >>= 7
    to.append(value)


def _take(part: bytes | memoryview, at: int, bits: int) -> tuple[int, int]:
    """Return the number of at most so many bits that begins there, and where it ends; BadFrame."""
    value, shift, more = 0, 0, 0x80
    while more:
        if at >= len(part):
            raise BadFrame("a number that is cut short")
        value |= (part[at] & 0x7F) << shift
        more, shift, at = part[at] & 0x80, shift + 7, at + 1
        if value >> bits or (not part[at - 1] and shift > 7):
            raise BadFrame("a number that is too long")
    return value, at


def _unsigned(value: int) -> int:
    return value << 1 if value >= 0 else ~(value << 1)


def _signed(value: int) -> int:
    return value >> 1 if not value & 1 else ~(value >> 1)
