"""The lines that ranks write of themselves, read as they come."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Rank = tuple[int, int]  # cluster, rank


@dataclass(frozen=True)
class Window:
    """When a fault was, and until when it was waited for; by the clock of the logs, in seconds.

    Pauses are those of the clusters that it did not befall: `cluster` is the one that it did.
    """

    kind: str
    cluster: int
    begin: float
    end: float


class Tail:
    """A rank's log: `records` has all whole lines up to the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.records: list[Record] = []
        self.step = 0  # the last one taken
        self._since = 0  # of how many records the process of now knows nothing

    def begins_anew(self) -> None:
        """Another process writes from now on."""
        self.look()
        self._since, self.step = len(self.records), 0

    def look(self) -> None:
        """Read what is new; a line that is not whole yet is left for the next time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rpartition(b"\n")[0]
        if not whole:
            return
        self._read += len(whole) + 1
        for line in whole.split(b"\n"):
            record: Record = json.loads(line)
            self.records.append(record)
            if record["what"] == "step":
                self.step = record["step"]

    @property
    def failure(self) -> str | None:
        """Why the process of now has failed, if it has."""
        for record in self.records[self._since :]:
            if record["what"] == "failed":
                return record["why"]
            if record["what"] == "exit" and record["status"]:
                return f"exit status {record['status']}"
        return None

    def has(self, *what: str) -> bool:
        """Return whether the process of now has written a record of one of these kinds."""
        return any(record["what"] in what for record in self.records[self._since :])


def note_exit(path: Path, status: int) -> None:
    """Write behind what a rank has written how its process has ended; a signal's is negative."""
    with path.open("ab", buffering=0) as file:
        record = {"what": "exit", "at": time.monotonic(), "status": status}
        file.write(json.dumps(record).encode() + b"\n")


def of_last_process(records: Sequence[Record]) -> Sequence[Record]:
    """Return what the last process of a rank has written."""
    return of_each_process(records)[-1]


def of_each_process(records: Sequence[Record]) -> list[Sequence[Record]]:
    """Return what the processes of a rank have written, one after another."""
    begins = [i for i, record in enumerate(records) if record["what"] == "begin"] or [0]
    return [records[a:b] for a, b in zip(begins, [*begins[1:], len(records)], strict=True)]


def last(records: Sequence[Record], what: str) -> Record | None:
    """Return the last record of a kind."""
    return next((record for record in reversed(records) if record["what"] == what), None)
