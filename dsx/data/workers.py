"""Processes that do a build's tasks side by side, and end with the process that started them.

Tasks are plain functions of what can be pickled. With one process all is done in this one. What a
task returns does not depend on which process did it, or when.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from typing import Any

_LOOKS_PER_SECOND = 5
Setup = Callable[[], Any]
Task = Callable[
    [Any, Callable[[int, int], object]], Any
]  # of what the setup has returned, and tell
Done = Callable[[int, Any], object]  # the number of a task and what it returned

_state: Any = None  # of a process of the pool: what its setup has returned
_sums: Any = None


class Sums:
    """Two running sums that all processes add to."""

    def __init__(self) -> None:
        self._own = [0, 0]
        self.shared: Any = None

    def add(self, first: int, second: int) -> None:
        """Add to both, in this process."""
        self._own[0] += first
        self._own[1] += second

    def read(self) -> tuple[int, int]:
        """Return both."""
        shared = (0, 0) if self.shared is None else self.shared[:]
        return self._own[0] + shared[0], self._own[1] + shared[1]


def run_all(
    tasks: Sequence[Task],
    setup: Setup,
    num_workers: int,
    sums: Sums,
    done: Done,
    tick: Callable[[], object],
) -> None:
    """Do the tasks with `num_workers` processes; `done` is told of each in this process.

    `setup` is called once per process. An error of a task ends all of them and is raised here;
    RuntimeError for a process that has vanished.
    """  # fmt: skip
    if min(num_workers, len(tasks)) < 2:
        state = setup() if tasks else None

        def tell(first: int, second: int) -> None:
            sums.add(first, second)
            tick()

        for index, task in enumerate(tasks):
            done(index, task(state, tell))
            tick()
        return
    with _pool(min(num_workers, len(tasks)), setup, sums) as pool:
        waiting: dict[Future[Any], int] = {}
        for index, task in enumerate(tasks):
            waiting[pool.submit(_do, task)] = index
        while waiting:
            ended, _ = wait(waiting, 1 / _LOOKS_PER_SECOND, FIRST_COMPLETED)
            for future in sorted(ended, key=waiting.__getitem__):
                done(waiting.pop(future), future.result())
            tick()


@contextmanager
def _pool(num_workers: int, setup: Setup, sums: Sums) -> Generator[ProcessPoolExecutor, None, None]:
    """Yield processes that are ended, whatever they are at, where this one is left by an error."""
    context = multiprocessing.get_context("spawn")
    sums.shared = sums.shared or context.Array("q", 2)
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_workers, context, _begin, (setup, sums.shared))
    try:
        yield pool
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()  # what they are at is written under names that count for nothing
        pool.shutdown(cancel_futures=True)  # its thread joins them: two that did would race
        if isinstance(error, BrokenProcessPool):
            raise RuntimeError(
                "a process of the build was ended from outside (out of memory?): give fewer of "
                "them, by --workers"
            ) from None
        raise
    pool.shutdown()


def _begin(setup: Setup, shared: Any) -> None:
    global _state, _sums
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _state, _sums = setup(), shared


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # this one was spawned
    wait_for([parent.sentinel])
    os._exit(1)


def _do(task: Task) -> Any:
    return task(_state, _tell)


def _tell(first: int, second: int) -> None:
    with _sums.get_lock():
        _sums[0] += first
        _sums[1] += second
