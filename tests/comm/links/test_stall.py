"""Connections that stand and carry nothing: what is under way arrives all the same."""

from __future__ import annotations

import threading
import time

import pytest

from dsx.comm.links.stall import Stall
from tests.comm.links.clusters import check, groups_of, swap, two_links


def test_patience_doubles_while_it_does_not_help() -> None:
    stall = Stall(4.0, now=100.0)
    assert stall.seconds(104.0, 100.0, float("inf")) is None
    assert stall.seconds(104.5, 100.0, float("inf")) == 4.5
    stall.renewed(104.5)
    assert stall.seconds(112.0, 100.0, float("inf")) is None
    assert stall.seconds(113.0, 100.0, float("inf")) == 8.5
    stall.renewed(113.0)
    assert stall.seconds(128.0, 127.0, 112.0) is None  # a chunk is owed, and not for 16 s yet
    assert stall.seconds(130.0, 129.0, 112.0) == 17.0
    stall.renewed(130.0)
    assert stall.seconds(195.0, 194.0, 194.5) is None  # sound for so long: patient no more
    assert stall.seconds(200.0, 200.0, 195.5) == 4.5


def test_a_pause_of_ones_own_does_not_count() -> None:
    stall = Stall(4.0, now=100.0)
    stall.excuse(10.0, 110.0)
    assert stall.seconds(113.0, 100.0, 100.0) is None
    assert stall.seconds(115.0, 100.0, 100.0) == 5.0
    stall.excuse(0.5, 115.0)  # a busy machine has many of them, and a stall shows all the same
    assert stall.seconds(115.0, 100.0, 100.0) == 4.5


@pytest.mark.parametrize("is_caller", [True, False], ids=["of the caller", "of the called"])
@pytest.mark.parametrize("number", [0, 1], ids=["short", "long"])
def test_a_connection_that_swallows_what_comes_is_made_anew(number: int, is_caller: bool) -> None:
    """As one does whose reader waits for the rest of a frame that has none."""
    with two_links(over_line=True, suspect_seconds=3.0) as (links, line):
        assert line is not None
        groups = groups_of(links)
        check(swap(groups, 3_000_000))
        line.swallows = lambda of, by: (of, by) == (number, is_caller)
        began = time.monotonic()
        for tag in range(1, 4):
            check(swap(groups, 3_000_000, tag))
            check(swap(groups, 100, tag + 10))
        seconds = time.monotonic() - began
        assert [link.why_gone((1 - m, 0)) for m, link in enumerate(links)] == ["", ""]
        assert len(line.said) > 2 and seconds < 15


@pytest.mark.parametrize("is_caller", [True, False], ids=["of the caller", "of the called"])
def test_a_line_that_stops_while_a_connection_is_made_anew_is_no_loss(is_caller: bool) -> None:
    with two_links(over_line=True, suspect_seconds=8.0) as (links, line):
        assert line is not None
        groups = groups_of(links)
        check(swap(groups, 3_000_000))
        line.swallows = lambda of, by: (of, by) == (1, is_caller)
        works = swap(groups, 3_000_000, 1)
        before, until = len(line.said), time.monotonic() + 20
        while len(line.said) == before and time.monotonic() < until:
            time.sleep(0.001)
        line.flows.clear()
        time.sleep(1.3)  # longer than a connection that is closed may take to come back
        assert [link.why_gone((1 - m, 0)) for m, link in enumerate(links)] == ["", ""]
        line.flows.set()
        check(works)


def test_who_is_silent_for_good_is_still_given_up() -> None:
    """And no earlier than it was: connections that are made anew are not a sign that it ended."""
    with two_links(over_line=True, suspect_seconds=3.0) as (links, line):
        assert line is not None
        check(swap(groups_of(links), 1000))
        line.swallows = lambda of, by: True
        began = time.monotonic()
        gone = threading.Event()
        while not gone.wait(0.05) and time.monotonic() < began + 20:
            if all(link.why_gone((1 - m, 0)) for m, link in enumerate(links)):
                gone.set()
        seconds = time.monotonic() - began
        whys = [link.why_gone((1 - m, 0)) for m, link in enumerate(links)]
        assert gone.is_set() and 2.5 < seconds < 10
        assert "nothing was heard of it" in whys[1], whys
