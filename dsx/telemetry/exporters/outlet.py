"""One sink, written to on a thread: a step waits for no network, and ends by none.

The files of the run's folder have a thread together; a sink that asks a network has its own.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

from dsx.telemetry.behind import Behind
from dsx.telemetry.exporters import mlflow, tensorboard, wandb
from dsx.telemetry.exporters.sink import Kind, Sink, Start, numbers_of, step_of

_FIND = {module.NAME: module.find for module in (wandb, mlflow, tensorboard)}


class Outlet:
    """Writes a cluster's records to a sink, which the first record of a start opens."""

    def __init__(self, kind: Kind, behind: Behind | None = None) -> None:
        self._kind = kind
        self._behind = behind or Behind()
        self._is_own = behind is None
        self._sink: Sink | None = None  # of the thread
        self._start: Start | None = None

    @classmethod
    def find(cls, name: str, behind: Behind) -> Outlet:
        """Return that of a name; ModuleNotFoundError, with the extra, without its library."""
        kind = _FIND[name]()
        return cls(kind, behind if name == tensorboard.NAME else None)

    def write(self, line: Mapping[str, Any], start: Start) -> None:
        """Have a record written, of this start of the run."""
        is_first, self._start = self._start is None, start
        self._behind.do(lambda: self._write(line, start), start.directory / self._kind.name)
        if is_first:  # behind that of the thread, so that it is called before
            atexit.register(self.close)

    def close(self) -> None:
        """Return once all is written; a later record opens the sink again."""
        if self._start is not None:
            start, self._start = self._start, None
            atexit.unregister(self.close)
            self._behind.do(self._close, start.directory / self._kind.name, 0)
        if self._is_own:
            self._behind.flush()
            self._behind.missing.tell()

    def _write(self, line: Mapping[str, Any], start: Start) -> None:
        if self._sink is None:
            self._sink = self._kind.open(start)
        if line["kind"] == "start":
            self._sink.describe(line)
        numbers = numbers_of(line)
        if numbers:
            self._sink.write(numbers, step_of(line), line["time"])

    def _close(self) -> None:
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.close()
