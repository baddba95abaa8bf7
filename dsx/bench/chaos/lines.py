"""A cluster's line: TCP connections to its port pass here, and can be reset, held and garbled.

Who has called is known by the processes' open sockets, so that what one cluster sends can be told
from what it receives.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK = 1 << 16
_MOST_WAITING = 1 << 20  # bytes of a connection that the other side does not take
_LOOK_SECONDS = 0.05
_HELD_SECONDS = 0.005
_RESET_ON_CLOSE = b"\x01\0\0\0\0\0\0\0"  # SO_LINGER: on, for no time


@dataclass
class _End:
    """A socket of a connection; what it says goes into `other.waiting`."""

    socket: socket.socket
    cluster: int | None  # whose process is at it; None until it is asked for
    port: int  # of the process
    other: _End = field(init=False)
    waiting: bytearray = field(default_factory=bytearray)
    is_over: bool = False


class Lines:
    """The lines of all clusters, served by one thread."""

    def __init__(self, ports: list[int], processes: Callable[[], dict[int, int]]) -> None:
        """`ports` by cluster; `processes` says to which cluster each process belongs."""
        self._ports, self._processes = ports, processes
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in ports]
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in self._listeners]
        self._ends: list[_End] = []
        self._held: dict[int | None, tuple[float, bool]] = {}  # until when, and whether both ways
        self._garbled: set[int] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        for cluster, listener in enumerate(self._listeners):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, cluster)
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def reset(self, cluster: int) -> int:
        """Reset every connection of a cluster, whoever has called; return how many there were."""
        with self._lock:
            self._find_callers()
            ends = [e for e in self._ends if e.cluster == cluster]
            for end in ends:
                self._end(end, resets=True)
        return len(ends)

    def hold(self, cluster: int, seconds: float, both_ways: bool = True) -> None:
        """Let nothing pass for so long: of what a cluster sends, and of what it is sent."""
        with self._lock:
            self._held[cluster] = (time.monotonic() + seconds, both_ways)

    def garble(self, cluster: int) -> None:
        """Change one byte of what a cluster sends next."""
        with self._lock:
            self._garbled.add(cluster)

    def close(self) -> None:
        """End all."""
        self._is_closed = True
        self._thread.join()
        for end in [*self._ends]:
            end.socket.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._is_closed:
            events = self._selector.select(_LOOK_SECONDS)
            with self._lock:
                if self._held or self._garbled:
                    self._find_callers()
                for key, _ in events:
                    if isinstance(key.data, int):
                        self._accept(self._listeners[key.data], key.data)
                for end in [*self._ends]:
                    if not end.is_over:
                        self._pass(end)
                now = time.monotonic()
                self._held = {c: held for c, held in self._held.items() if held[0] > now}
                is_held = bool(self._held)
            if is_held:
                time.sleep(_HELD_SECONDS)  # what cannot be read yet is ready all the time

    def _accept(self, listener: socket.socket, cluster: int) -> None:
        try:
            near, (_, port) = listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection(("127.0.0.1", self._ports[cluster]), 1.0)
        except OSError:  # nobody listens there, or not yet
            near.close()
            return
        ends = [_End(near, None, port), _End(far, cluster, self._ports[cluster])]
        ends[0].other, ends[1].other = ends[1], ends[0]
        for end in ends:
            end.socket.setblocking(False)
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end.socket, selectors.EVENT_READ, end)
            self._ends.append(end)

    def _find_callers(self) -> None:
        """Find out who has called, now that it matters: it takes longer than to accept a call."""
        callers = {e.port: e for e in self._ends if e.cluster is None}
        found = _owners([*callers], self._processes()) if callers else {}
        for port, cluster in found.items():
            callers[port].cluster = cluster

    def _is_held(self, end: _End) -> bool:
        """Whether what this end's process says has to wait."""
        says, is_told = self._held.get(end.cluster), self._held.get(end.other.cluster)
        return says is not None or (is_told is not None and is_told[1])

    def _pass(self, end: _End) -> None:
        """Hand on what an end says, and what the other side has not taken yet."""
        other = end.other
        if not self._is_held(end):
            try:
                while len(other.waiting) < _MOST_WAITING:
                    data = end.socket.recv(_CHUNK)
                    if not data:
                        return self._end(end)
                    if end.cluster in self._garbled:
                        self._garbled.discard(end.cluster)
                        data = data[:-1] + bytes([data[-1] ^ 1])
                    other.waiting += data
            except BlockingIOError:
                pass
            except OSError:
                return self._end(end, resets=True)
        if other.waiting:
            with contextlib.suppress(BlockingIOError):
                try:
                    sent = other.socket.send(other.waiting)
                except BlockingIOError:
                    raise
                except OSError:
                    return self._end(end, resets=True)
                del other.waiting[:sent]
        return None

    def _end(self, end: _End, resets: bool = False) -> None:
        """Close both sockets of a connection, in order or not."""
        for one in (end, end.other):
            if one.is_over:
                continue
            one.is_over = True
            self._ends.remove(one)
            self._selector.unregister(one.socket)
            with contextlib.suppress(OSError):
                if resets:
                    one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                elif one.waiting:
                    one.socket.setblocking(True)
                    one.socket.settimeout(0.2)
                    one.socket.sendall(one.waiting)
            one.socket.close()


def _owners(ports: list[int], processes: dict[int, int]) -> dict[int, int]:
    """Return the clusters of the processes whose sockets have these ports of the loopback's."""
    by_socket: dict[str, int] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        port = int(fields[1].rpartition(":")[2], 16)
        if port in ports and fields[9] != "0":
            by_socket[f"socket:[{fields[9]}]"] = port
    found: dict[int, int] = {}
    for pid, cluster in processes.items():
        with contextlib.suppress(OSError):
            for file in (Path("/proc") / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if (name := os.readlink(file)) in by_socket:
                        found[by_socket[name]] = cluster
    return found
