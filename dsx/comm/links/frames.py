"""What travels on a link: a head of fixed size, which says what it is, and a body that it bounds.

A head that does not fit (another version, an unknown kind, a length that is not the body's, a
sender that is not the connection's) makes the frame one that is dropped, counted and named.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

VERSION = 1
CHUNK_BYTES = 1 << 19  # of a message in one frame: what others wait for on a line, at most
MOST_BODY_BYTES = 1 << 22  # of anything
MOST_MESSAGE_BYTES = CHUNK_BYTES << 32  # an acknowledgement has four bytes for a chunk's number
HELLO, DATA, ACKS, READY, PROBE, ASK, ANSWER, CLOSED = range(1, 9)
_KINDS = range(HELLO, CLOSED + 1)
_HEAD = struct.Struct("<BBHIQqIIQQQ")
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
        return _HEAD.pack(
            VERSION, self.kind, self.sender, body_bytes, key.lane, key.tag, key.number,
            self.attempt, self.serial, self.start, self.total,
        )  # fmt: skip

    @classmethod
    def read(cls, head: bytes | memoryview, body_bytes: int) -> Frame:
        """Read a head that came with a body of so many bytes; BadFrame if it is not one."""
        if len(head) != _HEAD.size:
            raise BadFrame(f"a head of {len(head)} bytes instead of {_HEAD.size}")
        version, kind, sender, length, lane, tag, number, attempt, serial, start, total = (
            _HEAD.unpack(head)
        )
        if version != VERSION:
            raise BadFrame(f"version {version} instead of {VERSION}")
        if kind not in _KINDS:
            raise BadFrame(f"kind {kind}")
        if length != body_bytes or length > MOST_BODY_BYTES:
            raise BadFrame(f"{body_bytes} bytes where the head says {length}")
        if kind == DATA and not (start < total and 0 < length <= total - start):
            raise BadFrame(f"bytes {start} to {start + length} of {total}")
        if kind == DATA and total > MOST_MESSAGE_BYTES:
            raise BadFrame(f"a message of {total} bytes, more than {MOST_MESSAGE_BYTES}")
        return cls(kind, sender, Key(lane, tag, number), attempt, serial, start, total)


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
