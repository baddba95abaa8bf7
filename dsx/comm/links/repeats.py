"""What repeats what a peer has been told already goes out now and then only, as a sign of life.

The log says all it knows with every tick, as messages may be lost. Over a link they are not, and on
a slow line that would be more than a transfer's codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dsx.comm.membership.messages import Append, Message, Status


class Repeats:
    """The last signs of life to each peer; `seconds` between two that say the same."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds, self._now = seconds, now
        self._last: dict[tuple[int, type[Message]], tuple[Message, float]] = {}

    def is_due(self, peer: int, message: Message) -> bool:
        """Whether a message has to go out; noted as sent if so."""
        if isinstance(message, Status):
            message = replace(message, sequence=0)  # which counts how often it is said
        elif not isinstance(message, Append) or message.entries:
            return True
        key, now = (peer, type(message)), self._now()
        said, at = self._last.get(key, (None, 0.0))
        if said == message and now < at + self._seconds:
            return False
        self._last[key] = message, now
        return True

    def forget(self, peer: int) -> None:
        """Another process is there, or none: it has been told nothing."""
        for key in [key for key in self._last if key[0] == peer]:
            del self._last[key]
