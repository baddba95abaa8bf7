"""Records of a run: one JSON line per inner step and per sync; other sinks have the same numbers.

Rank 0 of a cluster writes `metrics.jsonl` (cluster 0) or `metrics.cluster_<m>.jsonl`. A step's
record is held back until the script has added its loss (`log_step`) or the next boundary comes; its
`time` is when the step ended, and that of any other record when it was written.
A resumed run drops the records of steps it takes again, and so does TensorBoard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsx.telemetry.behind import Behind
from dsx.telemetry.exporters.outlet import Outlet
from dsx.telemetry.exporters.sink import Start
from dsx.telemetry.jsonl import RecordFile
from dsx.telemetry.run_folder import cluster_file


class Metrics:
    """Writes one cluster's records; every method is a no-op without a directory.

    `behind` does the writing; a failure takes records, and ends nothing.
    """

    def __init__(
        self, cluster_id: int, to: Sequence[str] = (), behind: Behind | None = None
    ) -> None:
        """`to` names further sinks; ModuleNotFoundError, with the extra, where one's is lacking."""
        self._cluster_id = cluster_id
        self._behind = behind or Behind()
        self._directory: Path | None = None
        self._file: RecordFile | None = None
        self._begins_at: int | None = 0
        self._held: dict[str, Any] | None = None
        self._outlets = [Outlet.find(name, self._behind) for name in to]
        self._start: Start | None = None  # of what has been written to since `begin`

    def begin(self, directory: Path | None, step: int | None) -> None:
        """Go on from `step`: the first record written drops those beyond it; None drops none."""
        self._end()  # training goes on, and waits for nobody
        self._directory, self._begins_at = directory, step

    def step(self, record: Mapping[str, Any]) -> None:
        """Hold the record of a boundary just passed, after writing the one before it."""
        self.flush()
        self._held = {"kind": "step", "time": time.time(), **record}

    def complete_step(self, fields: Mapping[str, Any]) -> None:
        """Add the script's own numbers to the held record."""
        if self._held is not None:
            self._held.update(fields)

    def event(self, kind: str, record: Mapping[str, Any]) -> None:
        """Write a record of another kind, behind those before it."""
        self._write({"kind": kind, **record})

    def writer(self, kind: str) -> Callable[[Mapping[str, Any]], None]:
        """Return what puts a record of a kind into the file, for work that `behind` does.

        Nothing without a directory. Further sinks have none of these records.
        """
        file = self._opened()
        if file is None:
            return lambda record: None
        return lambda record: file.append(json.dumps(self._line({"kind": kind, **record})) + "\n")

    def flush(self) -> None:
        """Hand over what is held back."""
        if self._held is not None:
            self._write(self._held)
            self._held = None

    def close(self) -> None:
        """Return once what is held back is written, and the files are closed."""
        self._end()
        for outlet in self._outlets:  # all were told before one is waited for
            outlet.close()
        self._behind.flush()

    def _end(self) -> None:
        """Have what is held back written, and the files closed."""
        self.flush()
        if self._file is not None:
            self._behind.do(self._file.close, self._file.path, 0)
            self._file = None
        for outlet in self._outlets:
            outlet.end()

    def _write(self, record: Mapping[str, Any]) -> None:
        file = self._opened()
        if file is None:
            return
        line = self._line(record)
        text = json.dumps(line) + "\n"
        self._behind.do(lambda: file.append(text), file.path)
        assert self._start is not None
        for outlet in self._outlets:
            outlet.write(line, self._start)

    def _line(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {"cluster": self._cluster_id, "time": time.time(), **record}

    def _opened(self) -> RecordFile | None:
        """Return the file that is written to; None without a directory."""
        if self._file is None and self._directory is not None:
            path = metrics_path(self._directory, self._cluster_id)
            self._file = RecordFile(path, self._begins_at)
            beyond = None if self._begins_at is None else self._begins_at + 1
            self._start = Start(self._directory, self._cluster_id, beyond)
            self._begins_at = None  # what still comes goes behind what there is
        return self._file


def metrics_path(directory: Path, cluster_id: int) -> Path:
    """Return the file of one cluster's records."""
    return cluster_file(directory, "metrics", ".jsonl", cluster_id)
