"""How much of what was sent over a connection may be without an acknowledgement.

As much as the connection carries in a moment. More would only lie in queues, ahead of what others
send later; less would leave the line idle until an acknowledgement is back. What it carries is seen
from each chunk: so many bytes were ahead of it, its own with them, and its acknowledgement came so
much later.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsx.comm.links.frames import CHUNK_BYTES

QUEUE_SECONDS = 0.25  # of the line's rate, beside two times there and back
LEAST_BYTES = 2 * CHUNK_BYTES
MOST_BYTES = 1 << 25
SHORT_WINDOW_BYTES = 1 << 18  # of connection 0, whatever it carries: signs of life wait behind it
_WEIGHT = 0.25  # of the last chunk against those before


@dataclass(frozen=True, slots=True)
class Sent:
    """A chunk that was handed over at a time, with bytes ahead of it and its own."""

    connection: int
    at: float
    ahead: int
    window: Window


class Window:
    """One connection's; of `fixed` bytes, or what is measured."""

    def __init__(self, connection: int, fixed: int | None = None) -> None:
        self._connection, self._is_fixed = connection, fixed is not None
        self.limit = LEAST_BYTES if fixed is None else fixed
        self.in_flight = 0

    @property
    def is_open(self) -> bool:
        """Whether one more chunk may go out."""
        return self.in_flight < self.limit

    def send(self, num_bytes: int, now: float) -> Sent:
        """Count a chunk as under way."""
        self.in_flight += num_bytes
        return Sent(self._connection, now, self.in_flight, self)

    def take_back(self, sent: Sent, num_bytes: int) -> bool:
        """Count it so no more; False if it was sent over an earlier connection of that number."""
        if sent.window is not self:
            return False
        self.in_flight -= num_bytes
        return True

    def arrived(self, sent: Sent, now: float, latency_seconds: float) -> None:
        """Learn from an acknowledgement; `latency_seconds` there and back without a queue."""
        if self._is_fixed:
            return
        seconds = max(now - sent.at, 1e-6)
        carried = sent.ahead * (QUEUE_SECONDS + 2 * latency_seconds) / seconds
        limit = (1 - _WEIGHT) * self.limit + _WEIGHT * carried
        self.limit = round(min(max(limit, LEAST_BYTES), MOST_BYTES))
