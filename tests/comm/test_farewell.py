"""What is said in leaving, and what the ranks of a cluster note for each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dsx.comm import farewell
from dsx.comm.farewell import Farewells
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.core.leaving import Reason
from dsx.core.membership import Seat
from tests.distributed import free_port

SEATS = [Seat.of(m, 3) for m in range(3)]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "_GRACE_SECONDS", 0.1)


def connected() -> list[Any]:
    """The ranks of one number in three clusters, connected to each other in this process."""
    store, device = dist.HashStore(), open_device("lo")
    with ThreadPoolExecutor(3) as threads:
        return list(
            threads.map(
                lambda seat: connect_gloo(store, seat, timedelta(seconds=20), device)[0], SEATS
            )
        )


def test_ranks_that_were_told_nothing_find_what_another_rank_has_heard() -> None:
    notes = dist.HashStore()
    first, second = connected(), connected()
    told = Farewells(first[1], SEATS[1], notes)
    untold = Farewells(second[1], SEATS[1], notes)
    leaving = Farewells(first[0], SEATS[0])
    assert leaving.first_lost(2) == (2, 0)
    assert told.first_lost(0) == (2, 0)
    assert untold.first_lost(0) == (2, 1)
    assert untold.first_lost(2) == (2, 1)  # one answer, whoever is missed next


@pytest.mark.parametrize("is_gone_before", [False, True])
def test_who_leaves_without_a_word_is_the_one(is_gone_before: bool) -> None:
    groups = connected()
    if is_gone_before:
        groups[0] = None
    here = Farewells(groups[1], SEATS[1])
    groups[0] = None
    assert here.first_lost(0) == (0, 1)


def test_a_cluster_that_is_said_to_be_lost_names_who_left_it() -> None:
    """Of a line that is broken between two, both say the other."""
    group = connected()
    here = Farewells(group[1], SEATS[1])
    assert Farewells(group[0], SEATS[0]).first_lost(1) == (1, 0)
    assert here.first_lost(0) == (0, 1)


def test_a_store_that_is_gone_is_not_waited_for() -> None:
    port = free_port()
    host = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    notes = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    groups = connected()
    here = Farewells(groups[1], SEATS[1], notes)
    del host
    assert here.first_lost(0) == (0, 1)


def test_who_has_said_why_and_is_gone_before_it_has_saved_is_not_waited_for() -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    from tests.comm.links.clusters import groups_of, two_links

    with two_links(grace_seconds=0.3) as (links, _):
        here, leaving = (
            Farewells(group, Seat.of(m, 2)) for m, group in enumerate(groups_of(links))
        )
        leaving.say_reason(Reason(1))
        assert until(lambda: here.heard_reason() == Reason(1))
        here.say_reason(Reason(1))
        here.say_saved()
        time.sleep(0.5)
        assert not here.have_saved()  # it is still at it
        links[1].close()
        assert until(here.have_saved)


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()
