"""A cluster that heals is cut off for longer than a closed connection may take to come back."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.comm.links.clusters import check, groups_of, swap, two_links

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
