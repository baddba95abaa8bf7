"""How far something has come that takes long (bytes of a disk, pieces of work), told on the log.

`12.3 GB of 53.5 GB, 118 MB/s, 349 s left`. Lines are warnings: a script that has not set up
logging shows them, and where nothing else is to be seen for minutes somebody wants to know why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dsx.core.units import format_bytes

SECONDS_BETWEEN = 10.0
SOON = 2.0  # seconds, where somebody may be looking on
logger = logging.getLogger(__name__)


class Progress:
    """Counts the bytes of one thing and tells of them; `tells`: whether this rank is to.

    A first time after `first_seconds`. `shown` writes a number of what is counted, if not bytes.
    """

    def __init__(
        self,
        what: str,
        total: int,
        tells: bool,
        clock: Callable[[], float] = time.monotonic,
        first_seconds: float = SECONDS_BETWEEN,
        shown: Callable[[float], str] = format_bytes,
        is_waited_for: bool = True,
    ) -> None:
        """Lines are of level INFO where nobody waits."""
        self._what = what
        self._total = total
        self._tells = tells
        self._clock, self._shown, self._is_waited_for = clock, shown, is_waited_for
        self._began = clock()
        self._told = self._began + first_seconds - SECONDS_BETWEEN
        self.done = 0

    def moved(self, count: int) -> None:
        """Count; from any one thread at a time."""
        self.done += count
        now = self._clock()
        if self._tells and self.done and now - self._told >= SECONDS_BETWEEN:
            self._told = now
            rate = self.done / (now - self._began)
            told = self._shown(self.done), self._shown(self._total), self._shown(rate)
            left = (self._total - self.done) / rate
            if self._is_waited_for:
                logger.warning("%s: %s of %s, %s/s, %.0f s left", self._what, *told, left)
            else:
                logger.info("%s: %s of %s, %s/s, %.0f s left", self._what, *told, left)

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return self._clock() - self._began


def as_count(count: float) -> str:
    """Write a number of things: "1,200"."""
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
