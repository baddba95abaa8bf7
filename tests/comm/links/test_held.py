"""A cluster that heals is cut off for longer than a closed connection may take to come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

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


class TwoLines:
    """Two links, connection 0 over a line of its own, which holds what is sent until it `flows`."""

    def __init__(self) -> None:
        options = LinkOptions(grace_seconds=GRACE_SECONDS, suspect_seconds=8.0)
        self.links = [Link(m, 0, None, options) for m in range(2)]
        self.first, self.others = (Line(self.links[0].port) for _ in range(2))
        self.first.flows.clear()
        calls = self.links[1]._switch._calls
        call = calls.call

        def by_its_line(peer: Any, index: int, address: tuple[str, int], key: Any = None) -> Any:
            return call(peer, index, address if index else (self.first.address, address[1]), key)

        calls.call = by_its_line  # type: ignore[method-assign]
        self.links[0].expect(1, 0, None)
        self.links[1].expect(0, 0, self.others.address)

    def stand(self) -> list[list[int]]:
        """Which connections stand, at either end."""
        peers = [link._switch.peers.get((1 - m, 0)) for m, link in enumerate(self.links)]
        return [sorted(peer.connections) if peer is not None else [] for peer in peers]

    def cut(self) -> None:
        for line in (self.first, self.others):
            line.is_open = False
            line.cut()

    def mend(self) -> None:
        self.first.flows.set()
        self.first.is_open = self.others.is_open = True

    def close(self) -> None:
        self.first.flows.set()
        for end in (*self.links, self.first, self.others):
            end.close()


@pytest.fixture
def two() -> Generator[TwoLines]:
    found = TwoLines()
    yield found
    found.close()


@pytest.mark.parametrize("is_kept", [True, False], ids=["of the view", "before there is one"])
def test_one_that_is_cut_off_before_connection_0_stands_is_noticed(
    two: TwoLines, is_kept: bool
) -> None:
    """By both, though messages alone went to and fro; who is no member may come to be there yet."""
    links = two.links
    wait_until(lambda: two.stand() == [[1], [1]])
    for link in links if is_kept else ():
        link.readmit()
        link.hold([0, 1], 0)
    works = swap(groups_of(links), 1000)  # acknowledged over connection 0
    two.cut()
    if is_kept:
        wait_until(lambda: all(links[m].is_lost((1 - m, 0)) for m in (0, 1)))
    else:
        time.sleep(5 * GRACE_SECONDS)
        assert not any(links[m].why_gone((1 - m, 0)) for m in (0, 1))
    two.mend()
    for m in (0, 1):
        links[m].wait_for(1 - m, 0, 20)
    assert not any(links[m].why_gone((1 - m, 0)) for m in (0, 1))
    check(works)


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
