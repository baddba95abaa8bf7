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

VERSION = 2
CHUNK_BYTES = 1 << 19  # of a message in one frame: what others wait for on a line, at most
JOINED_BYTES = 1 << 16  # of a body that goes in one part with its head
MOST_BODY_BYTES = 1 << 22  # of anything
MOST_MESSAGE_BYTES = CHUNK_BYTES << 32  # an acknowledgement has four bytes for a chunk's number
HELLO, DATA, ACKS, READY, PROBE, ASK, ANSWER, CLOSED, AGAIN = range(1, 10)
_KINDS = range(HELLO, AGAIN + 1)
_FIXED = struct.Struct("<BBHIQ")  # version, kind, sender, bytes of the body, lane
_BITS = (64, 32, 32, 64, 64, 64)  # of what follows: tag, number, attempt, serial, start, total
_ACK = struct.Struct("<QI?")


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
        head = bytearray(_FIXED.pack(VERSION, self.kind, self.sender, body_bytes, key.lane))
        tag = key.tag << 1 if key.tag >= 0 else ~(key.tag << 1)
        for value in (tag, key.number, self.attempt, self.serial, self.start, self.total):
            while value > 0x7F:
                head.append(value & 0x7F | 0x80)
                value >>= 7
            head.append(value)
        return bytes(head)

    @classmethod
    def read(cls, head: bytes | memoryview, body_bytes: int) -> Frame:
        """Read a head that came with a body of so many bytes; BadFrame if it is not one."""
        frame, length = cls._read(head)
        if length != len(head):
            raise BadFrame(f"a head of {length} bytes, and {len(head) - length} behind it")
        _require_bytes(frame, head, body_bytes)
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
        frame, length = cls._read(part)
        _require_bytes(frame, part, len(part) - length)
        return frame, part[length:]

    @classmethod
    def _read(cls, part: bytes | memoryview) -> tuple[Frame, int]:
        """Return a head and its length."""
        if len(part) < _FIXED.size:
            raise BadFrame("a head that is cut short")
        version, kind, sender, _, lane = _FIXED.unpack_from(part)
        if version != VERSION:
            raise BadFrame(f"version {version} instead of {VERSION}")
        if kind not in _KINDS:
            raise BadFrame(f"kind {kind}")
        at, values = _FIXED.size, list[int]()
        for bits in _BITS:
            value, shift, more = 0, 0, 0x80
            while more:
                if at >= len(part):
                    raise BadFrame("a head that is cut short")
                value |= (part[at] & 0x7F) << shift
                more, shift, at = part[at] & 0x80, shift + 7, at + 1
                if value >> bits or (not part[at - 1] and shift > 7):
                    raise BadFrame("a number in the head that is too long")
            values.append(value)
        tag, number, attempt, serial, start, total = values
        tag = tag >> 1 if not tag & 1 else ~(tag >> 1)
        return cls(kind, sender, Key(lane, tag, number), attempt, serial, start, total), at


def _require_bytes(frame: Frame, head: bytes | memoryview, body_bytes: int) -> None:
    """Raise BadFrame for a body that is not what its head says."""
    length, start, total = _FIXED.unpack_from(head)[3], frame.start, frame.total
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
    """Return the body of an ACKS frame."""
    return b"".join(_ACK.pack(a.serial, a.chunk, a.is_awaited) for a in acks)


def read_acks(body: bytes | memoryview) -> list[Ack]:
    """Read the body of an ACKS frame; BadFrame if it is not one."""
    if len(body) % _ACK.size:
        raise BadFrame(f"{len(body)} bytes of acknowledgements")
    return [Ack(*fields) for fields in _ACK.iter_unpack(body)]
