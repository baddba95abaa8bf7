"""A link is one thread of ours, whatever the number of peers and lanes.

Two are libzmq's, and one more for each stream after the first, up to four, as they encrypt.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from pathlib import Path

import torch

from dsx.comm.links.group import LinkGroup
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from dsx.core.membership import Seat
from tests.comm.links.clusters import SOON, KnownKeys, pairs_of, two_links

NUM_CLUSTERS, NUM_STREAMS, NUM_BYTES = 4, 3, 200_000


def num_threads() -> int:
    """Of this process, by the kernel's count."""
    return len(list(Path("/proc/self/task").iterdir()))


def num_once(wanted: int) -> int:
    """The same, once those that have ended are gone."""
    until = time.monotonic() + 10
    while num_threads() > wanted and time.monotonic() < until:
        time.sleep(0.02)
    return num_threads()


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@contextlib.contextmanager
def joined(num_clusters: int, streams: int) -> Generator[list[Link]]:
    """Yield links of clusters that are all connected with each other."""
    pairs = pairs_of(num_clusters)
    options = LinkOptions(streams=streams)
    links = [Link(m, 0, KnownKeys(m, pairs), options) for m in range(num_clusters)]
    try:
        for m, link in enumerate(links):
            for other in range(num_clusters):
                address = f"127.0.0.1:{links[other].port}" if other < m else None
                if other != m:
                    link.expect(other, 0, address)
        for m, link in enumerate(links):
            for other in range(num_clusters):
                if other != m:
                    link.wait_for(other, 0, 20)
        yield links
    finally:
        for link in links:
            link.close()


def exchange(links: list[Link], num_lanes: int) -> None:
    """Send a message over each lane, from everybody to everybody."""
    works = []
    for lane in range(num_lanes):
        for m, link in enumerate(links):
            group = LinkGroup(link, f"lane {lane}", Seat.of(m, len(links)))
            for other in range(len(links)):
                if other != m:
                    place = torch.empty(NUM_BYTES, dtype=torch.uint8)
                    works.append(group.recv([place], other, 0))
                    works.append(group.send([torch.ones_like(place)], other, 0))
    for work in works:
        work.wait(SOON)


def test_threads_of_a_link_do_not_grow_with_peers_and_lanes() -> None:
    with two_links() as (links, _):  # pyzmq's own, of which a process has one
        exchange(links, 1)
        with_two = num_threads()
    before, known = num_once(with_two - 2 * 3), names()
    assert before == with_two - 2 * 3
    with joined(NUM_CLUSTERS, streams=NUM_STREAMS) as links:
        exchange(links, 1)
        first = num_threads()
        exchange(links, 12)
        assert num_threads() == first
        assert first - before == (1 + 1 + NUM_STREAMS) * NUM_CLUSTERS
        ours = sorted(set(names()) - set(known))
        assert ours == ["dsx-link"] and names().count("dsx-link") == NUM_CLUSTERS
    assert num_once(before) == before
