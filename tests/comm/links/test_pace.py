"""A rate is kept, by the hour, whatever the chunks."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.pace import Hours, Pace
from tests.comm.links.clusters import check, groups_of, swap

MB = 1 << 20


class Clock:
    seconds = 0.0
    minute = 0


@given(
    mbit=st.floats(1, 10_000),
    chunks=st.lists(st.integers(1, 1 << 19), min_size=200, max_size=400),
    share=st.sampled_from([1.0, 0.25]),
)
def test_the_rate_is_kept(mbit: float, chunks: list[int], share: float) -> None:
    clock = Clock()
    pace = Pace(mbit, (), share, lambda: clock.seconds, lambda: 0)
    sent = 0
    for chunk in chunks:
        clock.seconds += pace.wait_seconds()
        assert pace.wait_seconds() < 1e-9
        pace.sent(chunk)
        sent += chunk
    rate = mbit * 1e6 / 8 * share
    at_once = max(rate * 0.05, 1 << 16) + max(chunks)
    assert rate * clock.seconds <= sent <= rate * clock.seconds + at_once * 1.001


def test_hours_have_their_own_rate() -> None:
    clock = Clock()
    hours = [Hours.read("08:00-18:00=200"), Hours.read("22:30-06:00=1000")]
    pace = Pace(None, hours, 1.0, lambda: clock.seconds, lambda: clock.minute)
    found: list[float | None] = []
    for text in ("00:00", "05:59", "06:00", "07:59", "08:00", "17:59", "18:00", "22:29", "22:30"):
        clock.seconds += 10
        clock.minute = 60 * int(text[:2]) + int(text[3:])
        pace.wait_seconds()
        rate = pace.bytes_per_second
        found.append(None if rate is None else rate * 8 / 1e6)
    assert found == [1000, 1000, None, None, 200, 200, None, None, 1000]


@pytest.mark.parametrize(
    "text", ["", "8-18=200", "08:00-18:00", "24:00-01:00=1", "08:60-09:00=1", "08:00-08:00=1",
             "08:00-18:00=0", "08:00-18:00=-1"],
)  # fmt: skip
def test_what_is_no_hours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be HH:MM-HH:MM=MBIT"):
        Hours.read(text)


def test_a_link_keeps_its_rate() -> None:
    links = [Link(m, 0, None, LinkOptions(dscp=8), Pace(160)) for m in range(2)]
    try:
        links[0].expect(1, 0, None)
        links[1].expect(0, 0, f"127.0.0.1:{links[0].port}")
        for m in range(2):
            links[m].wait_for(1 - m, 0, 20)
        started = time.monotonic()
        check(swap(groups_of(links), 20 * MB))
        seconds = time.monotonic() - started
        assert 20 * MB * 8 / seconds < 160e6 * 1.1
    finally:
        for link in links:
            link.close()
