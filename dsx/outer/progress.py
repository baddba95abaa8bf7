"""How far bytes have come, from another cluster or a disk, told on the log: of what takes long.

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

    A first time after `first_seconds`.
    """

    def __init__(
        self,
        what: str,
        total: int,
        tells: bool,
        clock: Callable[[], float] = time.monotonic,
        first_seconds: float = SECONDS_BETWEEN,
    ) -> None:
        self._what = what
        self._total = total
        self._tells = tells
        self._clock = clock
        self._began = clock()
        self._told = self._began + first_seconds - SECONDS_BETWEEN
        self.done = 0

    def moved(self, num_bytes: int) -> None:
        """Count; from any one thread at a time."""
        self.done += num_bytes
        now = self._clock()
        if self._tells and self.done and now - self._told >= SECONDS_BETWEEN:
            self._told = now
            rate = self.done / (now - self._began)
            logger.warning(
                "%s: %s of %s, %s/s, %.0f s left", self._what, format_bytes(self.done),
                format_bytes(self._total), format_bytes(rate), (self._total - self.done) / rate,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return self._clock() - self._began
