"""A cluster that heals is cut off for longer than a closed connection may take to come back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

import pytest

from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from tests.comm.links.clusters import Line, check, groups_of, swap, two_links

GRACE_SECONDS = 0.2


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("healing", [0, 1], ids=["the called one heals", "the caller heals"])
def test_one_who_heals_is_taken_back(healing: int) -> None:
    """Each keeps the other, and what was under way goes on; who heals is told of its questions."""
    with two_links(over_line=True, suspect_seconds=8.0, grace_seconds=GRACE_SECONDS) as (
        links,
        line,
    ):
        assert line is not None
        member = 1 - healing
        for m, link in enumerate(links):
            link.readmit()
            link.hold([member] if m == member else [], 0)
        check(swap(groups_of(links, "before"), 1000))
        line.is_open = False
        line.cut()
        wait_until(lambda: all(links[m].why_gone((1 - m, 0)) for m in (0, 1)))
        line.is_open = True
        wait_until(lambda: not any(links[m].why_gone((1 - m, 0)) for m in (0, 1)))
        for m in (0, 1):
            links[m].wait_for(1 - m, 0, 20)
        check(swap(groups_of(links, "after"), 1000))
        links[healing].hold([0, 1], 1)  # a view takes it in
        links[member].hold([0, 1], 1)
        time.sleep(0.3)
        assert not any(links[m].has_let_go((1 - m, 0)) for m in (0, 1))


@contextlib.contextmanager
def two_without(swallowed: int) -> Generator[tuple[list[Link], Line]]:
    """Yield two links over a line that swallows what goes over one of their two connections."""
    options = LinkOptions(grace_seconds=GRACE_SECONDS, suspect_seconds=8.0, streams=1)
    links = [Link(m, 0, None, options) for m in range(2)]
    line = Line(links[0].port)
    line.swallows = lambda number, _: number == swallowed
    try:
        links[0].expect(1, 0, None)
        links[1].expect(0, 0, line.address)
        peers = [link._switch.peers for link in links]
        wait_until(lambda: all(ps and all(p.connections for p in [*ps.values()]) for ps in peers))
        yield links, line
    finally:
        for link in links:
            link.close()
        line.close()


def cut_before_connection_0_stands(links: list[Link], line: Line, is_kept: bool) -> None:
    for link in links if is_kept else ():
        link.readmit()
        link.hold([0, 1], 0)
    works = swap(groups_of(links), 1000)  # acknowledged over connection 0
    line.is_open = False
    line.cut()
    if is_kept:
        wait_until(lambda: all(links[m].is_lost((1 - m, 0)) for m in (0, 1)))
    else:
        time.sleep(5 * GRACE_SECONDS)
        assert not any(links[m].why_gone((1 - m, 0)) for m in (0, 1))
    line.swallows, line.is_open = lambda *_: False, True
    for m in (0, 1):
        links[m].wait_for(1 - m, 0, 20)
    assert not any(links[m].why_gone((1 - m, 0)) for m in (0, 1))
    check(works)


@pytest.mark.parametrize("is_kept", [True, False], ids=["of the view", "before there is one"])
def test_one_that_is_cut_off_before_connection_0_stands_is_noticed(is_kept: bool) -> None:
    """By both, though messages alone went to and fro; who is no member may come to be there yet."""
    for attempt in range(20):  # the line may take either one first
        with two_without(attempt % 2) as (links, line):
            stand = [[*peer.connections] for link in links for peer in link._switch.peers.values()]
            if stand == [[1], [1]]:
                return cut_before_connection_0_stands(links, line, is_kept)
    pytest.fail("connection 0 has stood each time")


def test_a_member_that_a_view_has_left_out_is_not_kept() -> None:
    with two_links(over_line=True, suspect_seconds=8.0, grace_seconds=GRACE_SECONDS) as (
        links,
        line,
    ):
        assert line is not None
        for link in links:
            link.readmit()
            link.hold([0, 1], 0)
        check(swap(groups_of(links), 1000))
        line.is_open = False
        line.cut()
        wait_until(lambda: all(links[m].why_gone((1 - m, 0)) for m in (0, 1)))
        links[0].hold([0], 1)
        time.sleep(0.3)
        line.is_open = True
        wait_until(lambda: links[1].has_let_go((0, 0)))
        time.sleep(0.3)
        assert not links[0].is_apart((1, 0)) and links[0].why_gone((1, 0))
