"""Sends notices to one place, on a thread of its own: in order, not too many, and with patience.

Training puts a notice down and goes on. What does not arrive is tried again, for some ten minutes,
and then given up; that is logged once, and counted. Of more than `per_hour` in an hour the rest is
held back: the next one that goes says how many there were, by kind, and the last of them follows as
soon as it may. How a run ends goes in any case.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

from dsx.telemetry.notices.hooks import Hook, Undelivered
from dsx.telemetry.notices.notice import ENDS, Notice

logger = logging.getLogger(__name__)
WAITS = (1.0, 5.0, 25.0, 120.0, 450.0)  # seconds between one try and the next
_TRY_SECONDS = 10.0
_HOUR = 3600.0
_MOST_WAITING = 1000  # notices, for a place that does not answer


class Sender:
    """Sends what is told of `kinds`, until `close`."""

    def __init__(
        self,
        hook: Hook,
        kinds: Collection[str],
        per_hour: int,
        waits: Sequence[float] = WAITS,
        window_seconds: float = _HOUR,
    ) -> None:
        self._hook, self._kinds, self._waits = hook, kinds, waits
        self._per_hour, self._window = per_hour, window_seconds
        self._queue: SimpleQueue[Notice | None] = SimpleQueue()
        self._sent: deque[float] = deque(maxlen=per_hour)  # when, by time.monotonic()
        self._held: Counter[str] = Counter()
        self._last_held: Notice | None = None
        self._lost, self._why = 0, ""
        self._until: float | None = None  # when to give up, once it is closed
        self._closing = threading.Event()
        self._is_closed, self._is_sending = False, False
        self._thread: threading.Thread | None = None

    def tell(self, notice: Notice) -> None:
        """Have it sent; returns at once."""
        if notice.kind not in self._kinds or self._closing.is_set():
            return
        if self._queue.qsize() >= _MOST_WAITING and notice.kind not in ENDS:
            return  # nobody has heard the last thousand either
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="dsx-notices", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, and starts no thread any more
                return self._send_here(notice)
            self._thread = thread
        self._queue.put(notice)

    def _send_here(self, notice: Notice) -> None:
        """Send the last notice of a process that ends, while it waits."""
        self._until = time.monotonic() + _TRY_SECONDS / 2
        self._closing.set()
        self._send(notice)

    def end(self, until: float) -> None:
        """Take no more, and have all sent by `until`, by time.monotonic(). Does not wait."""
        if not self._closing.is_set():
            self._until = until
            self._closing.set()
            self._queue.put(None)

    def close(self, until: float) -> None:
        """Return once all is sent, or at `until`, by time.monotonic(); then say what was not."""
        if self._is_closed:
            return
        self._is_closed = True
        self.end(until)
        left = 0
        if self._thread is not None:
            self._thread.join(max(until - time.monotonic(), 0.0))
            left = max(self._queue.qsize() - 1, 0) + self._is_sending
        if self._lost + left:
            why = self._why or "it has not answered in time"
            logger.warning(
                "of the notices to %s %d have not arrived: %s", self._hook.name, self._lost + left,
                why,
            )  # fmt: skip

    def _run(self) -> None:
        while True:
            wait = self._seconds_to_wait() if self._last_held is not None else None
            try:
                notice = self._queue.get(timeout=wait)
            except Empty:
                self._send_held()
                continue
            if notice is None:
                self._send_held()
                return
            if self._seconds_to_wait() > 0 and notice.kind not in ENDS:
                if self._last_held is not None:
                    self._held[self._last_held.kind] += 1
                self._last_held = notice
                continue
            if self._last_held is not None:
                self._held[self._last_held.kind] += 1
                self._last_held = None
            self._send(notice)

    def _send_held(self) -> None:
        """Send the last one that was held back, which tells of the others."""
        notice, self._last_held = self._last_held, None
        if notice is not None:
            self._send(notice)

    def _seconds_to_wait(self) -> float:
        """Return how long until one more may go."""
        if len(self._sent) < self._per_hour:
            return 0.0
        return max(self._sent[0] + self._window - time.monotonic(), 0.0)

    def _send(self, notice: Notice) -> None:
        self._is_sending = True
        try:
            self._deliver(replace(notice, held=dict(self._held)))
        finally:
            self._is_sending = False

    def _deliver(self, notice: Notice) -> None:
        self._held.clear()
        self._sent.append(time.monotonic())
        tries, began = 0, time.monotonic()
        for pause in [*self._waits, None]:
            tries += 1
            try:
                self._hook.deliver(notice, self._seconds_for_a_try())
                return
            except Undelivered as error:
                self._why = str(error)
                if not error.may_retry or pause is None:
                    break
                if not self._may_go_on(max(pause, error.wait_seconds)):
                    break
            except Exception as error:  # its text may have the address in it
                self._why = f"{type(error).__name__} in sending it"
                break
        self._give_up(tries, time.monotonic() - began)

    def _seconds_for_a_try(self) -> float:
        if self._until is None:
            return _TRY_SECONDS
        return min(max(self._until - time.monotonic(), 0.5), _TRY_SECONDS)

    def _may_go_on(self, pause: float) -> bool:
        """Wait before another try; False where the run has ended, and there is no time for one.

        A run that ends waits a second, and not as long as it would otherwise.
        """
        if not self._closing.wait(pause):
            return True
        assert self._until is not None
        left = self._until - time.monotonic()
        if left < 1.0:
            return False
        time.sleep(min(pause, 1.0))
        return True

    def _give_up(self, tries: int, seconds: float) -> None:
        self._lost += 1
        if self._lost == 1 and not self._closing.is_set():
            logger.warning(
                "a notice to %s has not arrived: %s (tries: %d, in %.0f s); training goes on, and "
                "how many more do not is told at the end", self._hook.name, self._why, tries,
                seconds,
            )  # fmt: skip
