"""How many cores the coding threads of a rank keep busy, and a turn for each of them.

Every fragment's transfers have a thread of their own, and what one computes torch spreads over
threads of its own. So that all of them together leave training its cores, as many as `at_once`
compute at a time, with as many threads each as then make up the budget. Turns are held while
something is computed, never over a wait: whoever waits for a turn gets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

Turn = Callable[[], AbstractContextManager[object]]

_ONE_AT_A_TIME = threading.Lock()  # of those who set their threads


class CodingCores:
    """The budget of one rank, of `cores`; made by its training thread, which it does not bind.

    `at_once` threads compute at a time, each with `threads` threads of torch.
    """

    def __init__(self, cores: int, at_once: int) -> None:
        self.cores, self.at_once = cores, min(at_once, cores)
        self.threads = cores // self.at_once
        self._turns = threading.Semaphore(self.at_once)
        self._training = threading.get_ident()
        self._own = threading.local()

    @contextmanager
    def turn(self) -> Generator[None, None, None]:
        """Hold a turn while something is computed; waits for one on any thread but training's."""
        if threading.get_ident() == self._training:
            yield
            return
        if not hasattr(self._own, "is_set"):
            set_own_threads(self.threads)
            self._own.is_set = True
        with self._turns:
            yield

    def __str__(self) -> str:
        share = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return f"at most {cores}: {self.at_once} at a time, {share} each"


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
