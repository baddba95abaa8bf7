"""Clusters that are told to end: the others go on, or all end where they could not."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable

import pytest

from dsx.comm.links.departures import Departures
from dsx.comm.membership.entries import Contributor, Said, View
from dsx.comm.membership.state import State
from dsx.core.leaving import ORDERED, Reason
from dsx.core.transport import PeerLost
from dsx.outer.transfer import Transfer
from tests.comm.links.sites import Site, run
from tests.comm.links.test_healing import NUM_STEPS as UNTIL_HEALED
from tests.comm.links.test_healing import cut_short, slowly
from tests.comm.links.test_members_lost import LAST, NUM_STEPS, check
from tests.tiny import ALL_CASES, TinyNet, mean_loss

THREE = tuple(Contributor(id, 10 + id) for id in range(3))


def said(id: int, incarnation: int, number: int = signal.SIGTERM, by: int | None = None) -> Said:
    key, value = Departures.saying(id, incarnation, Reason(id, number, leaves=True))
    return Said(key, value, id if by is None else by)


def test_one_of_three_may_leave_and_two_may_not() -> None:
    log = Departures(None)
    assert log.could_go(2, THREE)
    log.take(said(2, 12), THREE)
    assert log.has_said(2, 12) and log.all_end is None
    assert not log.could_go(0, THREE) and log.could_go(0, THREE, alone=True)
    log.take(said(0, 10, ORDERED), THREE)
    assert log.all_end == Reason(2, signal.SIGTERM)
    assert log.left(THREE, THREE[:2]) == (2,)


def test_who_has_left_counts_no_more() -> None:
    log = Departures(None)
    log.take(said(2, 12), THREE)
    log.take(View(2, THREE[:2]), THREE[:2])
    assert log.all_end is None
    log.take(said(1, 11), THREE[:2])
    assert log.all_end == Reason(1, signal.SIGTERM)


def test_a_loss_may_end_what_was_a_leave() -> None:
    log = Departures(None)
    log.take(said(2, 12), THREE)
    log.take(View(2, THREE[1:]), THREE[1:])  # cluster 0 is lost, and had said nothing
    assert log.all_end == Reason(2, signal.SIGTERM)
    assert log.left(THREE, THREE[1:]) == ()


@pytest.mark.parametrize(("arbiter", "may"), [(None, False), (0, True), (1, False)])
def test_of_two_the_arbiter_decides(arbiter: int | None, may: bool) -> None:
    assert Departures(arbiter).could_go(1, THREE[:2]) is may


def test_nobody_says_it_for_another_and_no_other_process_is_meant() -> None:
    log = Departures(None)
    for entry in (
        said(2, 12, by=1), Said("leave/2", "15", 2), Said("leave/2/x", "15", 2),
        Said("leave/2/12", "[[[", 2), Said("leave/2/12", "9999", 2), Said("port/2", "1", 2),
    ):  # fmt: skip
        log.take(entry, THREE)
        assert not log.has_said(2, 12)
    log.take(said(2, 12), THREE)
    log.take(said(1, 9), THREE)  # of an earlier process
    assert log.all_end is None


def test_who_joins_knows_what_was_said_before() -> None:
    state = State(contributors=THREE[:2])
    for entry in (said(1, 11), Said("port/1", "7", 1), said(0, 9), said(0, 10, by=1)):
        state = state.after(entry)
    log = Departures(None)
    log.take_copy(state)
    assert log.has_said(1, 11) and log.has_said(0, 9) and not log.has_said(0, 10)
    assert log.all_end == Reason(1, signal.SIGTERM)
    of_three = Departures(None)
    of_three.take_copy(State(contributors=THREE).after(said(1, 11)))
    assert of_three.all_end is None and of_three.left(THREE, (THREE[0], THREE[2])) == (1,)


def until(what: Callable[[], object]) -> None:
    limit = time.monotonic() + 20
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.01)


def leave(site: Site) -> None:
    """Say it, hand over, go: as a cluster does that is told to end."""
    clerk, loop = site.clerk, site.loop
    assert clerk is not None and loop is not None and clerk.may_leave()
    clerk.say_told_to_end(Reason(site.id))
    until(lambda: clerk.has_said_told)
    under_way = [t.pending for t in loop.in_flight if isinstance(t, Transfer)]
    until(lambda: all(pending.has_arrived for pending in under_way))
    clerk.leave()
    until(clerk.has_left.is_set)
    assert clerk.departures.all_end is None
    site.is_over.set()
    raise PeerLost("this one has left")


@pytest.mark.parametrize("leaver", [0, 2])
@pytest.mark.parametrize("name", ["diloco", "recommended"])
def test_the_others_go_on_and_lose_no_round(
    name: str, leaver: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the first one leaves, which has led the log."""
    gone = threading.Event()
    longest, last = dict.fromkeys(range(3), 0.0), dict.fromkeys(range(3), 0.0)

    def before(site: Site, step: int) -> None:
        now = time.monotonic()
        longest[site.id] = max(longest[site.id], now - last[site.id] if step > 2 else 0.0)
        last[site.id] = now
        if site.id == leaver and step == LAST + 1:
            try:
                leave(site)
            finally:
                gone.set()
        if step == NUM_STEPS:  # of those who go on: one that has left hears so from them
            until(gone.is_set)

    caplog.set_level(logging.INFO)
    method = ALL_CASES[name].method(3)
    sites = run(method, TinyNet(), mean_loss, NUM_STEPS, before=before, by_log=True)
    left = [site for site in sites if site.id != leaver]
    check(left, epoch=left[0].epochs[-1])
    assert left[0].epochs[-1] > 1
    assert f"cluster {leaver} has left: going on with clusters" in caplog.text
    assert "is lost" not in caplog.text
    assert max(longest[site.id] for site in left) < 5


def test_where_two_of_three_are_told_all_end_alike() -> None:
    ends: dict[int, Reason | None] = {}

    def before(site: Site, step: int) -> None:
        clerk = site.clerk
        assert clerk is not None
        if step == LAST and site.id != 1:
            clerk.say_told_to_end(Reason(site.id))
        if step == LAST + 4:
            until(lambda: clerk.departures.all_end)
            ends[site.id] = clerk.departures.all_end

    method = ALL_CASES["diloco"].method(3)
    sites = run(method, TinyNet(), mean_loss, NUM_STEPS, before=before, by_log=True)
    assert len({*ends.values()}) == 1 and ends[0] in (Reason(0), Reason(2))
    assert [site.epochs[-1] for site in sites] == [0, 0, 0]


@pytest.mark.ci
def test_one_that_heals_knows_who_was_told_to_end_before() -> None:
    """Three of four train on; of those one is told, and the fourth is started again after that."""
    told = threading.Event()

    def before(site: Site, step: int) -> None:
        slowly(site, step)
        clerk = site.clerk
        if site.id == 1 and step == LAST + 4 and clerk is not None:
            clerk.say_told_to_end(Reason(1))
            until(lambda: clerk.has_said_told)
            told.set()

    sites = run(
        ALL_CASES["diloco"].method(4), TinyNet(), mean_loss, UNTIL_HEALED, 4,
        fates={3: cut_short}, before=before, by_log=True, again=3, begin_again=told,
    )  # fmt: skip
    assert sites[4].members_at[UNTIL_HEALED] == (0, 1, 2, 3)
    for site in (sites[0], sites[4]):
        assert site.clerk is not None and site.clerk.departures.all_end is None
        assert site.clerk.departures.has_said(1, sites[1].link.incarnation)
