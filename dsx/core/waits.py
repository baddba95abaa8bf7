"""What the threads of this process wait for at the moment, so that a stall can explain itself.

    with waiting_for("fragment 3 launched at step 40, from cluster 1", deadline_seconds):
        work.wait(...)

notes it on the way in and forgets it on the way out, which takes a microsecond and no lock. Keeping
the deadline is up to what waits; telemetry/stalls.py looks here now and then, and reports a wait
that has lasted half of its deadline. Of a wait that goes on by signs of life (fifo.py) whoever
knows that it does tells so by `give_sign`, on the thread that waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

PATIENCE_SECONDS = 600.0  # of a wait whose deadline is not known here, as an engine's collective


class Wait:
    """One wait of one thread: `what` for, `since` when and for how long at most, as a context."""

    __slots__ = ("_what", "deadline_seconds", "is_reported", "since", "thread")

    def __init__(self, what: str | Callable[[], str], deadline_seconds: float | None) -> None:
        self._what = what
        self.deadline_seconds = deadline_seconds
        self.since = 0.0  # by time.monotonic()
        self.thread = 0  # its threading.get_ident()
        self.is_reported = False

    @property
    def what(self) -> str:
        """What is waited for, now."""
        return self._what if isinstance(self._what, str) else self._what()

    @property
    def due(self) -> float:
        """When half of the deadline has passed, by time.monotonic()."""
        deadline = PATIENCE_SECONDS if self.deadline_seconds is None else self.deadline_seconds
        return self.since + deadline / 2

    def __enter__(self) -> Wait:
        self.since, self.thread = time.monotonic(), threading.get_ident()
        _under_way[id(self)] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _under_way.pop(id(self), None)


class NextWait:
    """A wait without a `with`: `begin` ends the one before, as a step ends and the next begins."""

    def __init__(self) -> None:
        self._wait: Wait | None = None

    def begin(self, what: str, deadline_seconds: float) -> None:
        """Wait for this from now on, and for nothing that was said before."""
        self.end()
        self._wait = Wait(what, deadline_seconds).__enter__()

    def end(self) -> None:
        """Wait no more."""
        if self._wait is not None:
            self._wait.__exit__(None, None, None)
            self._wait = None


_under_way: dict[int, Wait] = {}  # one operation on it is atomic, so that nobody takes a lock


def waiting_for(what: str | Callable[[], str], deadline_seconds: float | None) -> Wait:
    """Return a context in which this thread waits for something, with its peers in the text.

    `what` may be a function, called from another thread, only where the wait is reported: it must
    not wait itself. `deadline_seconds` is None where whoever waits does not know it.
    """
    return Wait(what, deadline_seconds)


_own = threading.local()


def signs_to(give: Callable[[], object]) -> None:
    """Have `give` called for each sign of life of this thread, from now on."""
    _own.give_sign = give


def give_sign() -> None:
    """Tell that this thread goes on, to whoever keeps its signs, if anybody does."""
    give: Callable[[], object] | None = getattr(_own, "give_sign", None)
    if give is not None:
        give()


def waits_under_way() -> list[Wait]:
    """Return what is waited for now, in all threads, the longest wait first."""
    return sorted(_under_way.copy().values(), key=lambda wait: wait.since)
