"""Ranks of a cluster, in threads, that are told to end at any moment: all stop at one place."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsx.comm.gloo import GlooPending
from dsx.comm.stop_place import StopPlace
from dsx.core.fifo import Fifo
from dsx.core.leaving import Reason
from dsx.core.transport import PeerLost, PeerPreempted

RANKS = 4
FIFO = Fifo("transfers")  # that nothing is submitted to
TOLD = Reason(0)


def agent(place: StopPlace, ends: threading.Event) -> None:
    """What Preemption's thread does, without its pauses."""
    while not ends.wait(0.0005):
        place.look()
        if place.reason is not None:
            place.agree()
            return


def transfer(value: BaseException | None = None) -> GlooPending:
    pending = GlooPending(FIFO, "a transfer", 1.0)
    if value is None:
        pending.future.set_result(torch.zeros(1))
    else:
        pending.future.set_exception(value)
    return pending


def train(place: StopPlace, meet: threading.Barrier, told_at: Any, rank: int) -> int:
    """Pass boundaries, each with a collective before and inside it."""
    random_ = random.Random(1000 * told_at[0] + rank)
    for step in range(1, 500):
        meet.wait(20)  # the gradients
        if (step, rank) == told_at:
            place.ask(TOLD)
        if random_.random() < 0.3:
            threading.Event().wait(random_.random() * 0.003)
        place.begin(step)
        assert place.may_receive(transfer())
        meet.wait(20)  # as act_on does
        if not place.may_leave():
            return step
    raise AssertionError("never stopped")


@pytest.mark.parametrize("told_at", [(3, 0), (7, 3), (12, 2), (20, 1)])
def test_all_ranks_stop_at_one_place(told_at: tuple[int, int]) -> None:
    store, meet, ends = dist.HashStore(), threading.Barrier(RANKS), threading.Event()
    places = [StopPlace(store, rank, RANKS, 20.0) for rank in range(RANKS)]
    with ThreadPoolExecutor(2 * RANKS) as threads:
        agents = [threads.submit(agent, place, ends) for place in places]
        stopped = [
            threads.submit(train, place, meet, told_at, rank) for rank, place in enumerate(places)
        ]
        found = {future.result(30) for future in stopped}
        ends.set()
        for future in agents:
            future.result(5)
    assert len(found) == 1
    assert min(found) >= told_at[0]


def test_a_rank_that_waits_at_a_boundary_stops_there_and_its_transfer_is_put_off() -> None:
    place = StopPlace(None, 0, 1, 5.0)
    place.begin(10)
    pending = GlooPending(FIFO, "never comes", 60.0)
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(place.may_receive, pending)
        assert not received.done()
        place.ask(TOLD)
        assert place.agree() == 10
        assert received.result(5) is False
    assert not place.may_leave(has_put_off=True)


def test_a_rank_that_was_not_asked_yet_waits_where_another_has_put_a_transfer_off() -> None:
    store = dist.HashStore()
    first, second = (StopPlace(store, rank, 2, 5.0) for rank in range(2))
    for place in (first, second):
        place.begin(10)
    first.ask(TOLD)
    with ThreadPoolExecutor(3) as threads:
        left = [threads.submit(place.may_leave, True) for place in (second, first)]
        agreed = threads.submit(first.agree)
        while second.reason is None:
            assert not left[0].done()
            second.look()
        assert second.agree() == agreed.result(5) == 10
        assert [future.result(5) for future in left] == [False, False]


def test_what_a_rank_has_left_all_leave() -> None:
    """A pipeline stage that has put a transfer off must receive it, as another is a step ahead."""
    store = dist.HashStore()
    first, second = (StopPlace(store, rank, 2, 5.0) for rank in range(2))
    for place in (first, second):
        place.begin(10)
    assert first.may_leave()
    for place in (first, second):
        place.ask(TOLD)
    assert not second.may_receive(GlooPending(FIFO, "late", 60.0))
    with ThreadPoolExecutor(2) as threads:
        agreed = [threads.submit(place.agree) for place in (first, second)]
        assert [future.result(5) for future in agreed] == [11] * 2
    assert second.may_leave(has_put_off=True)
    for place in (first, second):
        place.begin(11)
        assert not place.may_leave()


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_peer_that_was_told_to_end_ends_this_cluster_and_no_error_does(is_asked: bool) -> None:
    left = PeerPreempted("cluster 1 left")
    left.reason = Reason(1, 10)
    place = StopPlace(None, 0, 1, 5.0)
    place.begin(4)
    if is_asked:
        place.ask(TOLD)
        left = PeerLost("killed after its save")
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(place.may_receive, transfer(left))
        while place.reason is None:
            assert not received.done()
        assert place.agree() == 4
        assert received.result(5) is False
    assert place.reason == (TOLD if is_asked else Reason(1, 10))


def test_a_peer_that_is_lost_is_an_error_as_ever() -> None:
    place = StopPlace(None, 0, 1, 5.0)
    place.begin(4)
    lost = transfer(PeerLost("cluster 1 closed its connection"))
    assert place.may_receive(lost)
    with pytest.raises(PeerLost, match="closed its connection"):
        lost.wait()


def test_ranks_that_do_not_answer_are_an_error_that_says_so() -> None:
    place = StopPlace(dist.HashStore(), 0, 2, 0.2)
    place.begin(1)
    place.ask(TOLD)
    said = r"told to end by SIGTERM \(cluster 0\), but the ranks .* have not all said within 0.2 s"
    with pytest.raises(RuntimeError, match=said):
        place.agree()
    with pytest.raises(RuntimeError, match=said):
        place.may_leave()


def test_a_reason_is_one_number_on_the_way() -> None:
    for reason in (Reason(0), Reason(3, 10), Reason(255, 0)):
        assert Reason.unpack(reason.pack()) == reason
    assert (Reason(0, 10).name, Reason(0, 10).exit_code) == ("SIGUSR1", 138)
    assert Reason(0, 0).exit_code == 143
