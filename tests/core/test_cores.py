"""A rank's coding threads keep to their budget, and training to all of its own threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier, Event, Lock
from typing import TypeVar

import pytest
import torch

from dsx.comm.gloo import GlooTransport
from dsx.core import cores as cores_module
from dsx.core import fifo as fifo_module
from dsx.core.cores import WHAT, CodingCores, seconds_waited, turn_inside
from dsx.core.exchange import Exchange
from dsx.core.fifo import Fifo
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost, Submission
from dsx.core.waits import waits_under_way

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


def until_waiting(count: int) -> None:
    """Return once so many threads wait for a turn."""
    until = time.monotonic() + SECONDS
    while [wait.what for wait in waits_under_way()].count(WHAT) != count:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_turns_are_handed_on_in_the_order_in_which_they_were_asked_for() -> None:
    """Who has had one and wants another comes after those who wait."""
    budget, order, may_end = CodingCores(1, 1), list[str](), Event()

    def twice() -> None:
        with budget.turn():
            assert may_end.wait(SECONDS)
        with budget.turn():
            order.append("again")

    def once(name: str) -> None:
        with budget.turn():
            order.append(name)

    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(twice)]
        for count, name in enumerate(("first", "second", "third"), 1):
            done.append(threads.submit(once, name))
            until_waiting(count)
        may_end.set()
        for one in done:
            one.result(SECONDS)
    assert order == ["first", "second", "third", "again"]
    until_waiting(0)


def test_seconds_waited_are_those_of_the_thread_that_waits() -> None:
    budget, is_held, may_end = CodingCores(1, 1), Event(), Event()

    def hold() -> float:
        with budget.turn():
            is_held.set()
            assert may_end.wait(SECONDS)
        return seconds_waited()

    def wait() -> float:
        with budget.turn():
            return seconds_waited()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(hold)
        assert is_held.wait(SECONDS)
        second = threads.submit(wait)
        until_waiting(1)
        time.sleep(0.1)
        may_end.set()
        assert first.result(SECONDS) == 0.0
        assert 0.1 <= second.result(SECONDS) < SECONDS
    assert seconds_waited() == 0.0


def test_a_transfer_tells_its_waits_for_cores_apart_from_its_coding() -> None:
    budget, may_end = CodingCores(1, 1), Event()
    transport = GlooTransport([0, 1], lambda what, number: [], Seat.of(0, 1), 30.0)

    def exchange() -> Exchange:
        with budget.turn():
            assert may_end.wait(SECONDS)
        return torch.zeros(1)
        yield  # no message

    first = transport.submit(Submission(0, 1, 0), exchange())
    until_waiting(0)
    second = transport.submit(Submission(1, 1, 0), exchange())
    until_waiting(1)
    time.sleep(0.2)
    may_end.set()
    both = sorted((first, second), key=lambda pending: (pending.wait(), pending.turn_seconds)[1])
    assert both[0].turn_seconds == 0.0 and both[0].coding_seconds >= 0.2
    assert both[1].turn_seconds >= 0.2 > both[1].coding_seconds
    for one in both:
        assert one.seconds == pytest.approx(one.coding_seconds + one.turn_seconds)
    transport.close()


def behind(monkeypatch: pytest.MonkeyPatch, count: int, hold: Callable[[], object]) -> str:
    """What becomes of a transfer behind so many turns, with a limit of 0.4 s between signs."""
    monkeypatch.setattr(fifo_module, "SLACK_SECONDS", 0.2)
    monkeypatch.setattr(cores_module, "_LOOK_SECONDS", 0.02)
    budget, fifo, done = CodingCores(1, 1), Fifo("dsx-fragment-0"), Future[str]()
    are_all_there = Event()

    def in_turn() -> str:
        with budget.turn():
            assert are_all_there.wait(SECONDS)
            hold()
        return "coded"

    def last() -> str:
        with budget.turn():
            return "coded"

    with ThreadPoolExecutor(count) as threads:
        for waiting in range(count):
            threads.submit(in_turn)
            until_waiting(waiting)
        fifo.submit(done, last)
        are_all_there.set()
        return fifo.result(done, "fragment 0 launched at step 40", 0.2)


def test_a_queue_that_goes_on_is_no_dead_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    assert behind(monkeypatch, 8, lambda: time.sleep(0.1)) == "coded"
    assert time.monotonic() - began > 0.7  # longer than without a sign


def test_one_that_stands_still_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = Event()
    threading.Timer(2.0, may_end.set).start()
    with pytest.raises(PeerLost, match=r"waits for a turn to code \(coding\.cores\)"):
        behind(monkeypatch, 1, lambda: may_end.wait(SECONDS))


def test_nobody_waits_for_a_gate_with_a_turn_nor_for_a_turn_with_a_gate() -> None:
    budget, gate, is_held, may_end = CodingCores(1, 1), Lock(), Event(), Event()

    def both() -> None:
        with turn_inside(gate, budget.turn):
            assert gate.locked()

    def hold() -> None:
        with budget.turn():
            is_held.set()
            assert may_end.wait(SECONDS)

    with ThreadPoolExecutor(2) as threads:
        with gate:  # held, as by a save: turns go on
            waits = threads.submit(both)
            held = threads.submit(hold)
            assert is_held.wait(SECONDS)
        until_waiting(1)
        assert gate.acquire(timeout=SECONDS)  # a save gets it, whoever computes
        gate.release()
        may_end.set()
        held.result(SECONDS)
        waits.result(SECONDS)
    assert not gate.locked()


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
