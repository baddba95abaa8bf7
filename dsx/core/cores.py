"""How many cores the coding threads of a rank keep busy, and a turn for each of them.

Every fragment's transfers have a thread of their own, and what one computes torch spreads over
threads of its own. So that all of them together leave training its cores, as many as `at_once`
compute at a time, with as many threads each as then make up the budget. Turns are held while
something is computed, never over a wait for anybody else: they go on to whoever has waited longest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

from dsx.core.waits import give_sign, waiting_for

Turn = Callable[[], AbstractContextManager[object]]
# cores that training on an accelerator keeps: it launches kernels on one, its backward on another
OF_AN_ACCELERATOR = 2
WHAT = "a turn to code (coding.cores)"

_ONE_AT_A_TIME = threading.Lock()  # of those who set their threads
_LOOK_SECONDS = 1.0  # how often who waits looks whether turns go on
_own = threading.local()


class CodingCores:
    """The budget of one rank, of `cores`; made by its training thread, which it does not bind.

    `at_once` threads compute at a time, each with `threads` threads of torch.
    """

    def __init__(self, cores: int, at_once: int) -> None:
        self.cores, self.at_once = cores, min(at_once, cores)
        self.threads = cores // self.at_once
        self._lock = threading.Lock()  # of the two, and for no longer than it takes to count
        self._free = self.at_once
        self._waiting: deque[threading.Lock] = deque()  # the first has waited longest
        self._ended = 0  # turns, so far
        self._training = threading.get_ident()
        self._of_thread = threading.local()

    @contextmanager
    def turn(self) -> Generator[None, None, None]:
        """Hold a turn while something is computed; waits for one on any thread but training's.

        First come, first served. While turns of others end, who waits gives signs of life; the
        wait itself has no limit.
        """
        if threading.get_ident() == self._training:
            yield
            return
        if not hasattr(self._of_thread, "is_set"):
            set_own_threads(self.threads)
            self._of_thread.is_set = True
        self._take()
        try:
            yield
        finally:
            self._hand_on()

    def _take(self) -> None:
        with self._lock:
            if self._free:  # then nobody waits
                self._free -= 1
                return
            mine, seen = threading.Lock(), self._ended
            mine.acquire()
            self._waiting.append(mine)
        with waiting_for(WHAT, None) as wait:
            began = wait.since
            while not mine.acquire(timeout=_LOOK_SECONDS):
                if self._ended != seen:
                    seen, wait.since = self._ended, time.monotonic()
                    give_sign()
        give_sign()
        _own.waited = seconds_waited() + time.monotonic() - began

    def _hand_on(self) -> None:
        with self._lock:
            self._ended += 1
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1

    def __str__(self) -> str:
        share = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return f"at most {cores}: {self.at_once} at a time, {share} each"


def seconds_waited() -> float:
    """Return how long this thread has waited for turns so far, in seconds."""
    return getattr(_own, "waited", 0.0)


@contextmanager
def turn_inside(gate: threading.Lock, turn: Turn) -> Generator[None, None, None]:
    """Hold a gate and a turn, and wait for either with none of the two in hand.

    So neither who holds the gate waits for cores, nor who has a turn for the gate.
    """
    while True:
        with gate:  # until whoever holds it lets go
            pass
        with turn():
            if gate.acquire(blocking=False):
                try:
                    yield
                finally:
                    gate.release()
                return


def set_own_threads(count: int) -> None:
    """Let torch compute with `count` threads where this thread asks for it, and nowhere else.

    torch keeps the number for threads that begin later, too: for those it is set back.
    """
    import torch

    with _ONE_AT_A_TIME:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        others = threading.Thread(target=torch.set_num_threads, args=(before,))
        others.start()
        others.join()
