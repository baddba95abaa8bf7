"""How fast a rank may send: dsx's share of a line, which may differ by the hour.

    "link": {"rate_mbit": 800, "hours": ["08:00-18:00=200", "22:30-06:00=1000"]}

is of a whole cluster, all its ranks and peers together, in the host's own time. Hours before others
come first; at no named hour it is `rate_mbit`, or no limit. What is short (greetings, words that
something has come) is not held back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_HOURS = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)=(\d+(?:\.\d+)?)")
_BURST_SECONDS = 0.05  # what may go out at once, after a pause
_LEAST_BURST_BYTES = 1 << 16
_LOOK_SECONDS = 5.0  # at the clock
_DAY = 24 * 60


@dataclass(frozen=True)
class Hours:
    """From `start` to before `stop`, minutes of a day, which may lie beyond midnight."""

    start: int
    stop: int
    mbit: float

    @classmethod
    def read(cls, text: str) -> Hours:
        """Read HH:MM-HH:MM=MBIT; ValueError says what is allowed."""
        found = _HOURS.fullmatch(text)
        numbers = [] if found is None else [int(part) for part in found.groups()[:4]]
        is_time = bool(numbers) and max(numbers[::2]) < 24 and max(numbers[1::2]) < 60
        if found is None or not is_time or numbers[:2] == numbers[2:] or float(found[5]) <= 0:
            raise ValueError(
                f"{text[:40]!r} must be HH:MM-HH:MM=MBIT, two times of the day and Mbit/s above 0; "
                'write, for example, "08:00-18:00=200"'
            )
        return cls(60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3], float(found[5]))

    def has(self, minute: int) -> bool:
        """Whether a minute of a day is among them."""
        return (minute - self.start) % _DAY < (self.stop - self.start) % _DAY


class Pace:
    """Whether a rank may send now, with `share` of its cluster's rate; for one thread.

    `now` are seconds that only go forward, `minute` that of the day.
    """

    def __init__(
        self,
        mbit: float | None,
        hours: Sequence[Hours] = (),
        share: float = 1.0,
        now: Callable[[], float] = time.monotonic,
        minute: Callable[[], int] = lambda: time.localtime().tm_hour * 60 + time.localtime().tm_min,
    ) -> None:
        self._mbit, self._hours, self._share = mbit, hours, share
        self._now, self._minute = now, minute
        self._at = self._look_at = now()
        self._rate = self._find_rate()
        self._left = self._burst  # bytes; below 0 where a chunk was larger

    @property
    def bytes_per_second(self) -> float | None:
        """What holds now; None for no limit."""
        return self._rate

    def limit(self, mbit: float) -> None:
        """Take another rate from now on, in the hours that have none of their own; any thread."""
        self._mbit, self._look_at = mbit, 0.0

    def wait_seconds(self) -> float:
        """Return in how many seconds something may go out, 0 for now."""
        now = self._now()
        if now >= self._look_at + _LOOK_SECONDS:
            self._look_at, self._rate = now, self._find_rate()
        if self._rate is None:
            self._at = now
            return 0.0
        self._left = min(self._left + self._rate * (now - self._at), self._burst)
        self._at = now
        return max(-self._left / self._rate, 0.0)

    def sent(self, num_bytes: int) -> None:
        """Count what has gone out."""
        self._left -= num_bytes

    @property
    def _burst(self) -> float:
        return max((self._rate or 0.0) * _BURST_SECONDS, _LEAST_BURST_BYTES)

    def _find_rate(self) -> float | None:
        minute = self._minute()
        named = next((hours.mbit for hours in self._hours if hours.has(minute)), self._mbit)
        return None if named is None else named * 1e6 / 8 * self._share
