"""How far a rank is: phases, each with its time, its processor time and its requests to stores.

Threads that serve torch's stores are told by their name. A request is a segment of data that has
left on a connection to a store, as Linux counts them: torch sends each by itself, and so a long one
counts as several.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsx.bench.start.job import Lap

_SERVES = "pt_tcpstore"
_DATA_SEGMENTS_OUT = 156  # tcpi_data_segs_out in linux/tcp.h
_INFO_BYTES = 256
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class Laps:
    """The phases of this process.

    `own` is the port of the cluster's store, and `shared` of where all meet, or what counts the
    requests that are sent there.
    """

    def __init__(self, shared: int | Callable[[], int], own: int) -> None:
        self._shared, self._own = shared, own
        self.laps: list[Lap] = []
        self._before = self._now()
        self._started = self._clocks()

    def lap(self, phase: str) -> None:
        """End a phase; looking at sockets counts for none."""
        seconds, cpu, serving = (
            now - then for now, then in zip(self._clocks(), self._started, strict=True)
        )
        now = self._now()
        shared, own = (max(a - b, 0) for a, b in zip(now, self._before, strict=True))
        self.laps.append(Lap(phase, seconds, cpu - serving, serving, shared, own))
        self._before, self._started = now, self._clocks()

    def around(self, place: Any, name: str, before: str, after: str) -> None:
        """End a phase where a function of a module or class is called, and one where it returns."""
        call: Callable[..., Any] = getattr(place, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.lap(before)
            result = call(*args, **kwargs)
            self.lap(after)
            return result

        setattr(place, name, timed)

    def _clocks(self) -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), serving_seconds()

    def _now(self) -> tuple[int, int]:
        sent = sent_by_port()
        shared = self._shared
        return sent.get(shared, 0) if isinstance(shared, int) else shared(), sent.get(self._own, 0)


def serving_seconds() -> float:
    """Return the processor time of this process's threads that serve stores."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith(_SERVES):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def sent_by_port() -> dict[int, int]:
    """Return the segments of data sent on this process's connections, by the peer's port."""
    found: dict[int, int] = {}
    for connection in _connections():
        port = connection.getpeername()[1]
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (count,) = struct.unpack_from("I", info, _DATA_SEGMENTS_OUT)
        found[port] = found.get(port, 0) + count
    return found


def num_sockets() -> int:
    """Return how many connections this process has, both of them where it is at both ends."""
    return sum(1 for _ in _connections())


def _connections() -> Iterator[socket.socket]:
    """Yield copies of this process's TCP connections, each until the next."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or no connection
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                if one.type == socket.SOCK_STREAM and one.family in _INTERNET:
                    one.getpeername()
                    yield one
