"""How long parts of a backward take: by the host's clock, or by events of an accelerator.

An accelerator runs behind the host, whose clock would measure how long it takes to enqueue. Events
are put among the kernels instead, and looked at once the step is over: those that it has not
reached by then stay for the next time, and nobody waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

NOTHING = 1e-9  # seconds: what takes no time, but has been measured


class HostClock:
    """Seconds between two moments of this thread, known at once."""

    def mark(self) -> float:
        """Return now."""
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float | None:
        """Return the time between two marks."""
        return ended - began


class EventClock:
    """Seconds between two events on the current stream; None while it has not come to the second.

    `make_event` gives one that takes times.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))

    def mark(self) -> Any:
        """Record an event behind what has been enqueued so far."""
        event = self._make_event()
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float | None:
        """Return the time between two events; it does not wait."""
        return began.elapsed_time(ended) / 1000 if ended.query() else None


class Laps:
    """The seconds of numbered parts, `seconds[part]`; None: not known so far."""

    def __init__(self, count: int, clock: HostClock | EventClock) -> None:
        self.seconds: list[float | None] = [None] * count
        self._clock: Any = clock
        self._is_known_at_once = isinstance(clock, HostClock)
        self._began: Any = None
        self._open: list[tuple[int, Any, Any]] = []

    def begin(self) -> None:
        """Begin the next part here."""
        self._began = self._clock.mark()

    def end(self, part: int) -> None:
        """End a part here; where none has begun, it has taken nothing."""
        ended = self._clock.mark()
        began, self._began = ended if self._began is None else self._began, None
        self._open.append((part, began, ended))
        if self._is_known_at_once:
            self.read()

    def skip(self, part: int) -> None:
        """Have a part take no time."""
        self.seconds[part] = NOTHING

    def read(self) -> None:
        """Look at what has ended, the oldest first, as far as it is known."""
        while self._open:
            part, began, ended = self._open[0]
            seconds = self._clock.seconds(began, ended)
            if seconds is None:
                return
            self.seconds[part] = max(seconds, NOTHING)
            del self._open[0]
