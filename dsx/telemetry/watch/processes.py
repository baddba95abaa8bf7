"""Which clusters' processes are gone, of those that run on this host."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from dsx.telemetry.run_folder import Record, is_alive

_CLOCK_SECONDS = 2.0  # that a record may be read behind the end of its process


class Processes:
    """Looks for the first rank of each cluster, whose number is in run.json.

    Where records go on to come, the number is of another namespace, as in a container, and says
    nothing.
    """

    def __init__(self) -> None:
        self._gone: dict[int, tuple[int, float]] = {}  # its number, and the last record by then
        self._unknown: set[tuple[int, int]] = set()

    @property
    def gone(self) -> set[int]:
        """The clusters whose process has gone without a word."""
        return set(self._gone)

    def look(self, abouts: Mapping[int, Record], last_words: Mapping[int, float]) -> bool:
        """Look again; return whether anything is different. Times in seconds since 1970."""
        before = self.gone
        for cluster, about in abouts.items():
            start = about["starts"][-1]
            process, last = start.get("pid"), last_words.get(cluster, 0.0)
            is_open = not start.get("end") and start.get("host") == socket.gethostname()
            if not is_open or not isinstance(process, int) or is_alive(process):
                self._gone.pop(cluster, None)
                continue
            number, seen = self._gone.get(cluster, (process, last))
            if number == process and last > seen + _CLOCK_SECONDS:
                self._unknown.add((cluster, process))
            if (cluster, process) in self._unknown:
                self._gone.pop(cluster, None)
            else:
                self._gone[cluster] = process, seen if number == process else last
        return before != self.gone
