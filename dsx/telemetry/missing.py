"""What of a run's records could not be written: told once when it begins, and counted to the end.

A full disk or a folder that has vanished takes records, and never the training.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

logger = logging.getLogger(__name__)


class Missing:
    """Counts by file what is not there; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Path, int] = {}
        self._reasons: dict[Path, str] = {}
        self._told: dict[str, int] = {}
        self._is_known = False

    def add(self, path: Path, reason: str, records: int = 1) -> None:
        """Count records that are not in a file; the first ones are told of."""
        with self._lock:
            self._counts[path] = self._counts.get(path, 0) + records
            self._reasons[path] = reason
            is_first, self._is_known = not self._is_known, True
        if is_first:
            logger.warning(
                "%s cannot be written: %s; training goes on, and what is missing of the run's "
                "records is told at its end", path, reason,
            )  # fmt: skip

    def forget(self, path: Path) -> None:
        """Count nothing for a file that has been written whole after all."""
        with self._lock:
            self._counts.pop(path, None)

    def by_file(self) -> dict[str, int]:
        """Return how many records each file lacks."""
        with self._lock:
            return {path.name: count for path, count in sorted(self._counts.items()) if count}

    def tell(self) -> None:
        """Say what is missing, unless that has been said."""
        found = self.by_file()
        if found and found != self._told:
            self._told = found
            with self._lock:
                reasons = {path.name: self._reasons[path] for path in self._counts}
            listed = "; ".join(f"{name}: {n} ({reasons[name]})" for name, n in found.items())
            logger.warning("records of the run are missing, by file: %s", listed)
