"""Links of ranks through what stands between hosts: the same messages, and cut lines come back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import pytest

from dsx.comm.links.gateway_process import GatewayProcess
from dsx.comm.links.greetings import rank_name
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from tests.comm.links.clusters import KnownKeys, check, groups_of, pairs_of, swap
from tests.comm.links.test_gateway import reset_all_to

MB = 1 << 20
NAME = rank_name("site-a", 0)


@contextmanager
def through(stack: ExitStack, way_out: bool) -> Generator[tuple[list[Link], int], None, None]:
    """Two links, the second of which calls the first's gateway; and the port that it calls."""
    pairs = pairs_of(2)
    links = [
        Link(m, 0, KnownKeys(m, pairs), LinkOptions(streams=2, grace_seconds=5.0)) for m in range(2)
    ]
    for link in links:
        stack.callback(link.close)
    gateway = GatewayProcess("127.0.0.1", 0)
    port = gateway.start()
    stack.callback(gateway.stop)
    gateway.update({NAME: (5, "127.0.0.1", links[0].port)})
    if way_out:
        own = GatewayProcess("127.0.0.1", 0)
        own.start()
        stack.callback(own.stop)
        port = own.update(ways={NAME: ("127.0.0.1", port)})[NAME]
    links[0].expect(1, 0, None)
    links[1].expect(0, 0, f"127.0.0.1:{port}", slot=5)
    for m in range(2):
        links[m].wait_for(1 - m, 0, 20)
    yield links, port


@pytest.mark.ci
@pytest.mark.parametrize("way_out", [False, True], ids=["slot", "way"])
def test_messages_come_as_they_were_and_a_reset_costs_a_resend(
    way_out: bool,
) -> None:
    with ExitStack() as stack, through(stack, way_out) as (links, port):
        groups = groups_of(links)
        check([work for n in (1, 65_537, 40 * MB) for work in swap(groups, n)])
        for _ in range(3):
            works = swap(groups, 30 * MB)
            reset_all_to(port)
            check(works)
        assert links[0].problems == links[1].problems == {}
