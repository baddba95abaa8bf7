"""One thread that runs what it is given in order, and a wait for it that ends in any case.

What runs there keeps deadlines of its own, and gives a sign of life between two waits. A thread
that gives none for longer than any of them may take (an accelerator hangs under a copy, say) is
given up: whoever waits gets an error, not a wait without end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

from dsx.core.transport import PeerLost
from dsx.core.waits import signs_to, waiting_for, waits_under_way

SLACK_SECONDS = 60.0  # above a deadline: for what is computed between two waits
_T = TypeVar("_T")


class Fifo:
    """A thread for submissions, in order.

    A daemon: a process that fails must not stay alive until the deadline of what is in flight.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._sign = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, future: Future[_T], task: Callable[[], _T]) -> None:
        """Run `task` after those before it; its result or error goes to `future`."""
        self._queue.put((future, task))

    @property
    def last_sign(self) -> float:
        """When it has last told that it goes on, by time.monotonic()."""
        return self._sign

    def give_sign(self) -> None:
        """Tell that the thread goes on; called on it."""
        self._sign = time.monotonic()

    def result(self, future: Future[_T], what: str, deadline_seconds: float) -> _T:
        """Wait for a submission; `what` names it, and `deadline_seconds` is that of its waits."""
        self.wait(future, what, deadline_seconds)
        return future.result()

    def wait(
        self,
        future: Future[Any],
        what: str,
        deadline_seconds: float,
        event: Future[Any] | None = None,
    ) -> None:
        """Wait until a submission has ended, or failed, or until the event is done."""
        awaited = [future] if event is None else [future, event]
        limit, began = deadline_seconds + SLACK_SECONDS, time.monotonic()
        with waiting_for(what, deadline_seconds):
            while not any(one.done() for one in awaited):
                left = max(self._sign, began) + limit - time.monotonic()
                if left <= 0:
                    raise PeerLost(self._explain(what, limit))
                futures.wait(awaited, left, futures.FIRST_COMPLETED)

    def end_soon(self) -> None:
        """End the thread after what has been submitted."""
        self._queue.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread, so long at most; whether it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _explain(self, what: str, limit: float) -> str:
        waits = [w.what for w in waits_under_way() if w.thread == self._thread.ident]
        doing = f"waits for {waits[-1]}" if waits else "is in no wait that dsx knows of"
        return (
            f"{what}: the thread {self._thread.name} has given no sign for {limit:g} s "
            f"(clusters.deadline_seconds and {SLACK_SECONDS:g}), so it is given up; it {doing}"
        )

    def _run(self) -> None:
        signs_to(self.give_sign)
        while (item := self._queue.get()) is not None:
            future, task = item
            self.give_sign()
            try:
                future.set_result(task())
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits, whatever it is
                future.set_exception(error)
            del item, future, task  # which would live until the next comes
            self.give_sign()
