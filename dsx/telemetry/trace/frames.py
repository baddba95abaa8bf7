"""A gzip file that is read in pieces: each piece is a member whose header says what is in it.

What follows one another in a gzip file is read as one by `zcat` and every library. A member's
header has room for more (RFC 1952, 2.3.1.1): here its length, so that the next one is found without
unpacking it, and which steps and what time it holds. A piece that is cut off, as a killed run
leaves one, ends the file.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_START = b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff"  # deflated, with more in the header
_ID = b"dX"
_FIELDS = struct.Struct("<IiiiiqqII")
_EXTRA = struct.Struct("<H2sH")  # the length of all that is more, of one thing its name and length
_BEGINNING = _START + _EXTRA.pack(_EXTRA.size - 2 + _FIELDS.size, _ID, _FIELDS.size)
_HEADER_BYTES = len(_BEGINNING) + _FIELDS.size
_LEVEL = 6


class Head(NamedTuple):
    """What a piece says of itself: `length` bytes from `offset` of the file.

    `first` and `last` are steps of any span, `taken` those of the training thread's (None without);
    `start` and `end` are microseconds; `dropped` are spans that are lacking before it.
    """

    offset: int
    length: int
    first: int
    last: int
    taken: tuple[int, int] | None
    start: int
    end: int
    num_spans: int
    dropped: int = 0


def pack(line: bytes, head: Head) -> bytes:
    """Return a piece; its `offset` and `length` are not looked at."""
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = deflate.compress(line) + deflate.flush()
    ends = struct.pack("<II", zlib.crc32(line), len(line))
    length = _HEADER_BYTES + len(packed) + len(ends)
    fields = _FIELDS.pack(
        length, head.first, head.last, *(head.taken or (0, -1)), head.start, head.end,
        head.num_spans, head.dropped,
    )  # fmt: skip
    return b"".join((_BEGINNING, fields, packed, ends))


def heads_of(path: Path) -> Iterator[Head]:
    """Yield what each piece says of itself, up to the end, or up to what is cut off."""
    with path.open("rb") as file:
        yield from _heads(file.fileno())


def end_of(head: Head | None) -> int:
    """Return where a piece ends: the last one's is short of the file's size if that is damaged."""
    return head.offset + head.length if head else 0


def lines_of(path: Path, heads: Iterable[Head]) -> Iterator[tuple[Head, bytes | None]]:
    """Yield what is in some pieces of a file; None for one that is damaged."""
    with path.open("rb") as file:
        for head in heads:
            file.seek(head.offset)
            yield head, _unpack(file.read(head.length))


def _heads(descriptor: int) -> Iterator[Head]:
    offset, size = 0, os.fstat(descriptor).st_size
    while offset + _HEADER_BYTES <= size:
        header = os.pread(descriptor, _HEADER_BYTES, offset)
        if len(header) < _HEADER_BYTES or not header.startswith(_BEGINNING):
            return
        length, first, last, low, high, start, end, count, dropped = _FIELDS.unpack_from(
            header, _HEADER_BYTES - _FIELDS.size
        )
        if length <= _HEADER_BYTES or offset + length > size:
            return
        taken = (low, high) if low <= high else None
        yield Head(offset, length, first, last, taken, start, end, count, dropped)
        offset += length


def _unpack(piece: bytes) -> bytes | None:
    try:
        line = zlib.decompress(piece[_HEADER_BYTES:-8], -zlib.MAX_WBITS)
    except zlib.error:
        return None
    return line if struct.unpack("<II", piece[-8:]) == (zlib.crc32(line), len(line)) else None
