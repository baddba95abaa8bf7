"""Writing into a run's folder on a thread of its own: no step waits for a disk, nothing is lost.

What has been handed over is written in order, also where the program ends by an error.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_MOST_EARLY = 1000  # lines, of a handle that never takes a step


class Behind:
    """Does what it is given, one after another, on a thread that starts with the first."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run-folder")

    def do(self, work: Callable[[], object]) -> None:
        """Have something done soon; a failure is told on the terminal."""
        try:
            done = self._thread.submit(work)
        except RuntimeError:  # closed, or the interpreter's very end: there is no soon
            done = _done_now(work)
        done.add_done_callback(_tell_failure)

    def flush(self) -> None:
        """Return once everything has been done."""
        with contextlib.suppress(RuntimeError):  # closed: everything has been done
            self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Return once everything has been done; what still comes is done at once."""
        self._thread.shutdown()


class RunLog(logging.Handler):
    """What the logger "dsx" lets through, in a file; lines are collected until `begin`."""

    def __init__(self, behind: Behind) -> None:
        super().__init__()
        self._path: Path | None = None
        self._behind = behind
        self._early: deque[str] | None = deque(maxlen=_MOST_EARLY)
        lines = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        lines.converter = time.gmtime
        lines.default_time_format, lines.default_msec_format = "%Y-%m-%dT%H:%M:%SZ", None
        self.setFormatter(lines)
        logging.getLogger("dsx").addHandler(self)

    def begin(self, path: Path) -> None:
        """Write from now on, behind what the file holds."""
        self._path = path
        self._behind.do(path.touch)
        early, self._early = self._early or (), None
        for line in early:
            self._write(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line; the thread that logs does not wait for the file."""
        line = self.format(record) + "\n"
        if self._early is None:
            self._write(line)
        else:
            self._early.append(line)

    def close(self) -> None:
        """Take no more lines."""
        logging.getLogger("dsx").removeHandler(self)
        super().close()

    def _write(self, line: str) -> None:
        path = self._path

        def append() -> None:
            assert path is not None
            with path.open("a") as file:
                file.write(line)

        self._behind.do(append)


def _done_now(work: Callable[[], object]) -> Future[object]:
    """Do something on this thread; return how it ended."""
    done: Future[object] = Future()
    try:
        done.set_result(work())
    except Exception as error:  # as an executor's thread takes it
        done.set_exception(error)
    return done


def _tell_failure(done: Future[object]) -> None:
    error = done.exception()
    if error is not None:  # not to the log, which may be what failed
        print(f"dsx: a file of the run's folder cannot be written: {error}", file=sys.stderr)
