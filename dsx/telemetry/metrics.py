"""Records of a run: one JSON line per inner step and per sync, TensorBoard optionally.

Rank 0 of a cluster writes `metrics.jsonl` (cluster 0) or `metrics.cluster_<m>.jsonl`. A step's
record is held back until the script has added its loss (`log_step`) or the next boundary comes.
A resumed run drops the records of steps it takes again, and so does TensorBoard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from dsx.telemetry.jsonl import reopen
from dsx.telemetry.run_folder import cluster_file


class Metrics:
    """Writes one cluster's records; every method is a no-op without a directory."""

    def __init__(self, cluster_id: int, tensorboard: bool = False) -> None:
        self._cluster_id = cluster_id
        self._directory: Path | None = None
        self._file: TextIO | None = None
        self._begins_at: int | None = 0
        self._held: dict[str, Any] | None = None
        self._open_board = _writer_of_boards() if tensorboard else None
        self._board: Any = None

    def begin(self, directory: Path | None, step: int | None) -> None:
        """Go on from `step`: the first record written drops those beyond it; None drops none."""
        self.close()
        self._directory, self._begins_at = directory, step

    def step(self, record: Mapping[str, Any]) -> None:
        """Hold the record of a boundary just passed, after writing the one before it."""
        self.flush()
        self._held = {"kind": "step", **record}

    def complete_step(self, fields: Mapping[str, Any]) -> None:
        """Add the script's own numbers to the held record."""
        if self._held is not None:
            self._held.update(fields)

    def event(self, kind: str, record: Mapping[str, Any]) -> None:
        """Write a record of another kind at once."""
        self._write({"kind": kind, **record})

    def flush(self) -> None:
        """Write what is held back."""
        if self._held is not None:
            self._write(self._held)
            self._held = None

    def close(self) -> None:
        """Write what is held back and close the files."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._directory is None:
            return
        if self._file is None:
            self._open(self._directory)
        assert self._file is not None
        line = {"cluster": self._cluster_id, "time": time.time(), **record}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            self._to_board(line)

    def _open(self, directory: Path) -> None:
        path, step = metrics_path(directory, self._cluster_id), self._begins_at
        self._file = reopen(path, step)
        if self._open_board is not None:
            board = directory / "tensorboard" / f"cluster_{self._cluster_id}"
            beyond = None if step is None else step + 1
            self._board = self._open_board(str(board), purge_step=beyond)
        self._begins_at = None  # what still comes goes behind what there is

    def _to_board(self, line: Mapping[str, Any]) -> None:
        step = line.get("step", line.get("applied_step"))
        prefix = line["kind"]
        if prefix == "sync":
            stage = f"stage_{line['stage']}/" if "stage" in line else ""
            prefix = f"sync/{stage}fragment_{line['fragment']}"
        for key, value in line.items():
            if isinstance(value, (int, float)) and key not in ("time", "step", "cluster"):
                self._board.add_scalar(f"{prefix}/{key}", value, step)  # type: ignore[union-attr]


def metrics_path(directory: Path, cluster_id: int) -> Path:
    """Return the file of one cluster's records."""
    return cluster_file(directory, "metrics", ".jsonl", cluster_id)


def _writer_of_boards() -> Callable[..., Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "metrics.tensorboard is true but tensorboard is not installed: pip install "
            '"dsx-train[tensorboard]"'
        ) from error
    return SummaryWriter
