"""One sink, written to on a thread: a step waits for no network, and ends by none.

The files of the run's folder have a thread together; a sink that asks a network has its own.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.telemetry.behind import Behind
from dsx.telemetry.exporters import mlflow, tensorboard, wandb
from dsx.telemetry.exporters.sink import Kind, Sink, Start, numbers_of, step_of

_AGAIN_SECONDS = 60.0  # between two tries to open a sink
_CLOSE_SECONDS = 15.0  # that the end of a run gives a network
_FIND = {module.NAME: module.find for module in (wandb, mlflow, tensorboard)}


class Outlet:
    """Writes a cluster's records to a sink, which the first record of a start opens."""

    def __init__(self, kind: Kind, behind: Behind | None = None) -> None:
        self._kind = kind
        self._behind = behind or Behind(_CLOSE_SECONDS, f"{kind.name} to take the last records")
        self._is_own = behind is None
        self._sink: Sink | None = None  # of the thread
        self._path: Path | None = None  # of what is written to; None: nothing is since the close
        self._has_ended = True
        self._trouble: Exception | None = None  # with which it could not be opened
        self._open_at = 0.0

    @classmethod
    def find(cls, name: str, behind: Behind) -> Outlet:
        """Return that of a name; ModuleNotFoundError, with the extra, without its library."""
        kind = _FIND[name]()
        return cls(kind, behind if name == tensorboard.NAME else None)

    def write(self, line: Mapping[str, Any], start: Start) -> None:
        """Have a record written, of this start of the run."""
        is_first, self._has_ended = self._path is None, False
        self._path = start.directory / self._kind.name
        self._behind.do(lambda: self._write(line, start), self._path)
        if is_first:  # behind that of the thread, so that it is called before
            atexit.register(self.close)

    def end(self) -> None:
        """Have the sink closed behind what is written; a later record opens it again."""
        if self._path is not None and not self._has_ended:
            self._has_ended = True
            self._behind.do(self._close, self._path)

    def close(self) -> None:
        """Return once all is written, or after a deadline; then say what was not."""
        atexit.unregister(self.close)
        self.end()
        path, self._path = self._path, None
        if self._is_own and path is not None:
            if left := self._behind.flush():
                self._behind.missing.add(path, "it does not answer", left)
            self._behind.missing.tell()

    def _write(self, line: Mapping[str, Any], start: Start) -> None:
        if self._sink is None:
            self._sink = self._open(start)
        if line["kind"] == "start":
            self._sink.describe(line)
        numbers = numbers_of(line)
        if numbers:
            self._sink.write(numbers, step_of(line), line["time"])

    def _open(self, start: Start) -> Sink:
        """Open the sink; one that could not be opened is left alone for a while."""
        if self._trouble is not None and time.monotonic() < self._open_at:
            raise self._trouble
        try:
            sink, self._trouble = self._kind.open(start), None
        except Exception as error:  # of a library
            self._trouble, self._open_at = error, time.monotonic() + _AGAIN_SECONDS
            raise
        return sink

    def _close(self) -> None:
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.close()
