"""Whether the copy that all clusters make now (copying.py) still goes on, and whom it waits for.

None begins another one before all have told that they are done, so one line that hangs holds up the
copies of all. That is told once for each copy: by the cluster whose line it is where no byte goes
over for half an hour, and by those that wait for it where they are done and hear nothing. Words of
others come with transfers (notices.py), however far apart these are: one's own word shows how long
that takes, and comes on top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

SECONDS = 1800.0


class Silence:
    """Of one copy after another; `cluster` is this one. On the training thread, but for `moved`."""

    def __init__(self, cluster: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        self.begin()

    def begin(self) -> None:
        """Take that all begin to copy."""
        self._heard = self._clock()
        self._done: float | None = None  # when this cluster's was over
        self._travel = 0.0  # seconds that its word took to come back
        self._is_told = False

    def moved(self) -> None:
        """Take that bytes go over here; from any thread."""
        self._heard = self._clock()

    def is_done_here(self) -> None:
        """Take that this cluster's copy is over, and posted."""
        self._done = self._clock()

    def told_by(self, cluster: int) -> None:
        """Take the word of a cluster, this one among them, that its copy is over."""
        self._heard = self._clock()
        if cluster == self._cluster and self._done is not None:
            self._travel = self._heard - self._done

    def longer_than(self, waits_for: Collection[int]) -> float | None:
        """Return after how many seconds it is to be told of whom all wait for, once; else None."""
        is_own = self._cluster in waits_for
        if self._is_told or not waits_for or (is_own and self._done is not None):
            return None
        seconds = SECONDS if is_own else SECONDS + self._travel
        if self._clock() - self._heard <= seconds:
            return None
        self._is_told = True
        return seconds
