"""How far a build has come, on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from dsx.core.units import format_bytes
from dsx.data.dataset import Progress

_SECONDS = 30.0  # between two lines


@contextmanager
def shown_progress() -> Generator[Callable[[Progress], object], None, None]:
    """Yield what shows progress while the context lasts."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(lambda line: print(line, file=sys.stderr, flush=True), time.monotonic)
        return
    columns = BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Bars(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None)
        pace = Pace(time.monotonic)

        def show(progress: Progress) -> None:
            text = pace.describe(progress)
            bars.update(
                bar, description=text, completed=progress.num_done, total=progress.num_bytes
            )

        yield show


class Lines:
    """Says a line every half minute."""

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._say, self._clock = say, clock
        self._pace = Pace(clock)
        self._next = clock() + _SECONDS
        self._is_first = True

    def __call__(self, progress: Progress) -> None:
        """Take note, and say so if it is time."""
        text = self._pace.describe(progress)
        if self._is_first and progress.num_kept:
            kept, of = format_bytes(progress.num_kept), format_bytes(progress.num_bytes)
            self._say(f"goes on: {kept} of {of} of the sources are encoded already")
        self._is_first = False
        if self._clock() >= self._next:
            self._next = self._clock() + _SECONDS
            self._say(text)


class Pace:
    """How fast it goes, since this process began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: tuple[float, int] | None = None

    def describe(self, progress: Progress) -> str:
        """Return what a line says."""
        now = self._clock()
        self._began = self._began or (now, progress.num_tokens)
        if progress.num_written:
            share = progress.num_written / max(progress.num_tokens, 1)
            return f"putting it together: {100 * share:.0f} % of {progress.num_tokens:,} tokens"
        seconds = now - self._began[0]
        fresh = progress.num_tokens - self._began[1]
        rate = f", {fresh / seconds:,.0f} tokens/s" if seconds > 1 else ""
        done, of = format_bytes(progress.num_done), format_bytes(progress.num_bytes)
        return (
            f"{done} of {of} of the sources, {progress.num_documents:,} documents, "
            f"{progress.num_tokens:,} tokens{rate}"
        )
