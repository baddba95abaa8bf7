"""What a mailbox keeps of each message, and how messages are counted."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsx.comm.links.frames import CHUNK_BYTES, DATA, Frame, Key
from dsx.comm.links.window import Sent

EAGER_BYTES = 2 * CHUNK_BYTES  # of a message that goes out before its place is known
TAGS_KEPT = 4096  # of a lane: each counts its messages; a launch's tag has two and never returns

Ended = Callable[[Exception | None], object]


class Counters:
    """The number of the next message, by lane and tag."""

    def __init__(self) -> None:
        self._next: dict[int, OrderedDict[int, int]] = {}

    def take(self, lane: int, tag: int) -> Key:
        """Return the key of the next message."""
        counts = self._next.setdefault(lane, OrderedDict())
        number = counts.pop(tag, 0)
        counts[tag] = number + 1
        if len(counts) > TAGS_KEPT:
            if 0 in counts:  # the one tag that is used again and again
                counts.move_to_end(0)
            counts.popitem(last=False)
        return Key(lane, tag, number)

    def forget(self, lane: int) -> None:
        """Forget a lane that has ended."""
        self._next.pop(lane, None)


class Serials:
    """Which messages of the peer are complete: all below a mark, and some above."""

    def __init__(self) -> None:
        self._below = 0
        self._above: set[int] = set()

    def add(self, serial: int) -> None:
        """Note one that is."""
        if serial >= self._below:
            self._above.add(serial)
            self._advance()

    def _advance(self) -> None:
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def raise_to(self, serial: int) -> None:
        """Count all below one as complete: those of a lane that ended may never come."""
        if serial > self._below:
            self._below = serial
            self._above = {each for each in self._above if each >= serial}
            self._advance()

    @property
    def num_kept(self) -> int:
        """Of single ones."""
        return len(self._above)

    def __contains__(self, serial: int) -> bool:
        return serial < self._below or serial in self._above


def num_chunks(num_bytes: int) -> int:
    """Return in how many frames a message goes."""
    return -(-num_bytes // CHUNK_BYTES)


@dataclass(eq=False)
class Outgoing:
    """A message under way; `under_way` has how each chunk was sent that is not acknowledged."""

    key: Key
    serial: int
    data: memoryview
    ended: Ended
    to_send: deque[int] = field(default_factory=deque[int])
    under_way: dict[int, Sent] = field(default_factory=dict[int, Sent])
    is_awaited: bool = False
    is_short: bool = False  # and so copied, and sent for its sender
    num_acked: int = 0

    def __post_init__(self) -> None:
        self.to_send.extend(range(num_chunks(len(self.data))))

    @property
    def has_next(self) -> bool:
        """Whether a chunk may go out now."""
        if not self.to_send:
            return False
        return self.is_awaited or (self.to_send[0] + 1) * CHUNK_BYTES <= EAGER_BYTES

    @property
    def is_there(self) -> bool:
        """Whether all of it has been acknowledged."""
        return self.num_acked == num_chunks(len(self.data))

    @property
    def owed_since(self) -> float:
        """When the oldest chunk was sent whose acknowledgement is due; infinite for none."""
        if not self.is_awaited and not self.is_short:
            return math.inf  # it may come, and be let go, and be asked for again
        return min((sent.at for sent in self.under_way.values()), default=math.inf)

    def frame(self, sender: int, start: int) -> Frame:
        """Return the head of the chunk that begins there."""
        total = len(self.data)
        return Frame(DATA, sender, self.key, serial=self.serial, start=start, total=total)

    def bounds(self, chunk: int) -> slice:
        """Return which bytes a chunk is."""
        start = chunk * CHUNK_BYTES
        return slice(start, min(start + CHUNK_BYTES, len(self.data)))


@dataclass(eq=False)
class Incoming:
    """A message that has a place, of which `missing` has not come."""

    key: Key
    place: memoryview
    ended: Ended
    missing: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self.missing.update(range(num_chunks(len(self.place))))


@dataclass(eq=False)
class Early:
    """Chunks of a message that has no place yet; some may have been let go."""

    total: int
    serial: int
    chunks: dict[int, Any] = field(default_factory=dict[int, Any])
    is_whole: bool = True

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here."""
        return len(self.chunks) == num_chunks(self.total)

    @property
    def num_bytes(self) -> int:
        """Of the chunks that are kept."""
        return sum(len(body) for body in self.chunks.values())
