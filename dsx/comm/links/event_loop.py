"""One thread that waits for many descriptors and deadlines at once (Linux's epoll).

Callbacks run in the thread of `run`, one at a time, and must not wait. Other threads, which look
up names, hand their results over by `post`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
FAILED = select.EPOLLERR
BROKEN = select.EPOLLERR | select.EPOLLHUP
_LONGEST_WAIT_SECONDS = 3600.0
Callback = Callable[[int], object]


class Timer:
    """A call that is due at a time of `time.monotonic`, unless it is cancelled before."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Do not call; harmless if it was called already."""
        self.call = None


class EventLoop:
    """Descriptors with their callbacks, and what is due; ValueError where there is no epoll."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ValueError(f"{sys.platform} cannot forward connections: it takes Linux's epoll")
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callback] = {}
        self._due: list[tuple[float, int, Timer]] = []
        self._number = itertools.count()
        self._posted: deque[Callable[[], object]] = deque()
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._is_running = True
        self._fresh: set[int] = set()  # watched since the last wait: events are of what was before
        self.watch(self._woken.fileno(), READ, self._take_posted)

    def watch(self, number: int, events: int, callback: Callback) -> None:
        """Call back with the events of a descriptor, as long as there are any."""
        self._epoll.register(number, events)
        self._callbacks[number] = callback
        self._fresh.add(number)

    def change(self, number: int, events: int, callback: Callback | None = None) -> None:
        """Wait for other events; for 0, a broken connection is told once and then no more."""
        self._epoll.modify(number, events or select.EPOLLET)
        if callback is not None:
            self._callbacks[number] = callback

    def forget(self, number: int) -> None:
        """Watch it no more; before it is closed, and harmless if it is not watched."""
        if self._callbacks.pop(number, None) is not None:
            self._epoll.unregister(number)

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call once, so many seconds from now."""
        timer = Timer(call)
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), timer))
        return timer

    def post(self, call: Callable[[], object]) -> None:
        """Have the loop's thread make a call; from any thread."""
        self._posted.append(call)
        self.wake()

    def wake(self) -> None:
        """End the loop's present wait."""
        with contextlib.suppress(OSError):  # it has been woken already, or has ended
            self._wake_up.send(b"\0")

    @property
    def wake_up_number(self) -> int:
        """Return the descriptor for `signal.set_wakeup_fd`."""
        return self._wake_up.fileno()

    def stop(self) -> None:
        """Have `run` return."""
        self._is_running = False
        self.wake()

    def run(self) -> None:
        """Serve until `stop`, or an exception of a callback."""
        while self._is_running:
            self._turn()

    def close(self) -> None:
        """Close the loop's own descriptors."""
        self._epoll.close()
        self._wake_up.close()
        self._woken.close()

    def _turn(self) -> None:
        while self._due and self._due[0][2].call is None:
            heapq.heappop(self._due)
        wait = self._due[0][0] - time.monotonic() if self._due else _LONGEST_WAIT_SECONDS
        self._fresh.clear()
        for number, events in self._epoll.poll(max(0.0, min(wait, _LONGEST_WAIT_SECONDS))):
            callback = self._callbacks.get(number)
            if callback is not None and number not in self._fresh:  # else it has just been closed
                callback(events)
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            call = heapq.heappop(self._due)[2].call
            if call is not None:
                call()

    def _take_posted(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._posted:
            self._posted.popleft()()


Found = Callable[["list[tuple[int, tuple[object, ...]]] | OSError"], object]


def look_up(loop: EventLoop, host: str, port: int, found: Found) -> None:
    """Call back with a host's (family, address) pairs or the error; numbers are found at once.

    The resolver has deadlines of its own; whoever calls has one, too.
    """
    try:
        found(_addresses(host, port, socket.AI_NUMERICHOST))
        return
    except OSError:  # it is a name
        pass

    def ask() -> None:
        try:
            answer = _addresses(host, port, 0)
        except (OSError, UnicodeError) as error:
            problem = OSError(0, f"no address is known for {host!r}: {error}")
            loop.post(lambda: found(problem))
        else:
            loop.post(lambda: found(answer))

    threading.Thread(target=ask, name="dsx-look-up", daemon=True).start()


def _addresses(host: str, port: int, flags: int) -> list[tuple[int, tuple[object, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(int(family), tuple(address)) for family, *_, address in found]


def close_number(number: int) -> None:
    """Close a descriptor that may be closed."""
    with contextlib.suppress(OSError):
        os.close(number)
