"""What the loop and an engine tell of their times, and the recorder that nobody asked for.

The one that writes is dsx/telemetry/trace/recorder.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from dsx.core.exchange import Exchange


class SpanTimer:
    """A span made of parts that follow one another; this one is not recorded."""

    def mark(self, name: str, category: str | None = None) -> None:
        """Record what ran since the mark before, or the start."""

    def end(self, **facts: Any) -> None:
        """Record the whole."""


_NO_TIMER = SpanTimer()


class Recorder:
    """What the loop tells; this one, where nobody asked, records nothing and costs nothing."""

    def span_timer(self, name: str, fragment: int, step: int) -> SpanTimer:
        """Begin a span of the training thread that concerns a fragment."""
        return _NO_TIMER

    def follow(self, exchange: Exchange, fragment: int, step: int) -> Exchange:
        """Return an exchange that is about to be submitted, to be run in its place."""
        return exchange

    def begin(self, step: int, path: Path) -> None:
        """Go on from `step`, in a file that is not written before a boundary has been passed."""

    def confirm(self) -> None:
        """Write from now on."""

    def end_step(self, step: int) -> None:
        """Write what there is; a boundary has been passed."""

    def flush(self) -> None:
        """Write what there is."""

    def close(self) -> None:
        """Write what there is and close the file."""


UNTRACED = Recorder()


class ComputeRecorder(Protocol):
    """What an engine tells of its own steps; `step` is the inner step being taken."""

    step: int

    def add(
        self,
        name: str,
        category: str,
        began: int,
        step: int | None = None,
        facts: dict[str, Any] | None = None,
    ) -> int:
        """Record a span of this thread that ends now, and return now, in `perf_counter_ns`."""
        ...

    def span(self, name: str, category: str) -> AbstractContextManager[None]:
        """Record what runs inside."""
        ...
