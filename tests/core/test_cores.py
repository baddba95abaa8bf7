"""A rank's coding threads keep to their budget, and training to all of its own threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Lock
from typing import TypeVar

import pytest
import torch

from dsx.core.cores import CodingCores

T = TypeVar("T")
SECONDS = 30.0


def elsewhere(call: Callable[[], T]) -> T:
    """What a call returns on a thread that has not computed before."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result(SECONDS)


@pytest.mark.parametrize(
    ("cores", "wanted", "at_once", "threads"),
    [(1, 5, 1, 1), (4, 1, 1, 4), (4, 3, 3, 1), (4, 4, 4, 1), (4, 9, 4, 1), (5, 2, 2, 2)],
)
def test_threads_at_once_and_those_of_each_stay_within_the_cores(
    cores: int, wanted: int, at_once: int, threads: int
) -> None:
    budget = CodingCores(cores, wanted)
    assert (budget.at_once, budget.threads) == (at_once, threads)
    assert budget.at_once * budget.threads <= cores


def test_as_many_compute_at_a_time_as_the_budget_says_and_no_more() -> None:
    """Two have to be there together to get on; a third is never there."""
    budget, both, lock = CodingCores(2, 6), Barrier(2), Lock()
    inside, most = [0], [0]

    def compute() -> None:
        with budget.turn():
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            both.wait(SECONDS)
            with lock:
                inside[0] -= 1
            both.wait(SECONDS)

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(compute) for _ in range(6)]:
            done.result(SECONDS)
    assert most == [2]


def test_the_training_thread_waits_for_no_turn() -> None:
    budget, is_held, may_end = CodingCores(1, 1), Event(), Event()

    def hold() -> None:
        with budget.turn():
            is_held.set()
            assert may_end.wait(SECONDS)

    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(hold)
        assert is_held.wait(SECONDS)
        with budget.turn():
            may_end.set()
        held.result(SECONDS)


def test_a_turn_sets_the_threads_of_its_own_thread_alone() -> None:
    of_training = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        budget = CodingCores(4, 2)

        def in_turn() -> int:
            with budget.turn():
                return torch.get_num_threads()

        assert elsewhere(in_turn) == 2
        assert torch.get_num_threads() == 3
        assert elsewhere(torch.get_num_threads) == 3  # of one that begins later
        with budget.turn():
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(of_training)
