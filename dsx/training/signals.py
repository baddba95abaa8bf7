"""Signals that end a run: they are noted, and somebody else looks.

A handler runs between two steps of the interpreter on the main thread, which may be inside a
collective for long. So the note that counts comes by Python's wakeup descriptor, which is written
to the moment a signal arrives, and which any thread may read. A handler that was there before is
called, too; where one is set later that does not call ours, the signal is that one's alone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class Signals:
    """Notes of some signals, from now on; made on the main thread, and closed there.

    `names` that nobody may handle here are warned of: those that the process was told to ignore,
    and all of them on another thread.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._before: dict[int, Any] = {}
        self._handled: dict[int, int] = {}  # how often, by the handler
        self._woken: dict[int, int] = {}  # and by the wakeup descriptor
        self._last = 0  # that has come
        self._own: Callable[[int, FrameType | None], None] = self._handle
        self._reader, self._writer = os.pipe()
        self._wakeup_before: int | None = None
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        if names:
            self._install(names)

    def wait(self, seconds: float) -> None:
        """Return once a signal has come, `wake` was called, or so much time has passed."""
        if not self._poll.poll(1000 * seconds):  # `select` takes no descriptor above 1,023
            return
        woken = os.read(self._reader, 4096)
        for number in woken:
            self._woken[number] = self._woken.get(number, 0) + 1
            self._last = number if number in self._before else self._last
        if self._wakeup_before not in (None, -1):
            os.write(self._wakeup_before, woken.replace(b"\0", b""))

    def wake(self) -> None:
        """Let `wait` return."""
        os.write(self._writer, b"\0")

    def count(self) -> tuple[int, int]:
        """Return how many of the signals have come so far, and the number of the last one."""
        counts = {
            number: max(
                self._handled.get(number, 0),
                self._woken.get(number, 0) if signal.getsignal(number) == self._own else 0,
            )
            for number in self._before
        }
        total = sum(counts.values())
        return total, self._last if total else 0

    def close(self) -> None:
        """Put back what was there before, where nobody has put something else since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._own:
                signal.signal(number, before)
        if self._wakeup_before is not None:
            current = signal.set_wakeup_fd(-1)
            ours = current == self._writer
            signal.set_wakeup_fd(self._wakeup_before if ours else current)
            self._wakeup_before = None

    def _install(self, names: Sequence[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "%s cannot be handled: this handle is made on thread %r, and Python handles "
                "signals on the main thread only; make it there, or call handle.preempt() where "
                "you hear of the end", " and ".join(names), threading.current_thread().name,
            )  # fmt: skip
            return
        for name in names:
            number = signal.Signals[name]
            before = signal.getsignal(number)
            if before == signal.SIG_IGN:
                logger.warning("%s is ignored by this process, and stays so", name)
                continue
            self._before[number] = before
            signal.signal(number, self._own)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled[number] = self._handled.get(number, 0) + 1
        self._last = number
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
