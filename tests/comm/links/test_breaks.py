"""Races, closings and keys that change: what links have to stand."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from datetime import timedelta
from typing import Any

import pytest
import torch
import zmq

from dsx.comm.links import window
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.peer import LinkDown
from dsx.comm.links.store import LinkStore, Shelf
from tests.comm.links.clusters import (
    SOON,
    KnownKeys,
    check,
    groups_of,
    pairs_of,
    swap,
    two_links,
)
from tests.levels import by_default

MB = 1 << 20


def test_what_is_posted_while_a_link_closes_ends() -> None:
    """Whenever it comes: no future is left behind."""
    for round_ in range(30):
        link = Link(0, 0, None, LinkOptions())
        posted: list[Future[Any]] = []
        is_over = threading.Event()

        def post(link: Link = link, posted: Any = posted, is_over: Any = is_over) -> None:
            while not is_over.is_set():
                posted.append(link.ask((1, 0), b"x"))

        link.expect(1, 0, None)
        thread = threading.Thread(target=post)
        thread.start()
        time.sleep(0.002 * (round_ % 5))
        link.close()
        is_over.set()
        thread.join()
        posted.append(link.ask((5, 0), b"to nobody that it has heard of"))
        posted.append(link.receive((6, 0), 1, 0, memoryview(bytearray(5))))
        for future in posted:
            with pytest.raises(LinkDown, match="this rank has closed its link"):
                future.result(5)


def test_a_closed_lane_is_told_though_the_line_is_cut() -> None:
    with two_links(over_line=True, grace_seconds=5.0) as (links, line):
        assert line is not None
        for number in range(15):
            groups = groups_of(links, f"lane {number}")
            place = torch.zeros(10, dtype=torch.uint8)
            work = groups[1].recv([place], 0, 0)
            groups[0].close()
            time.sleep(0.001 * (number % 3))
            line.cut()
            with pytest.raises(RuntimeError, match="has closed its transport"):
                work.wait(timedelta(seconds=5))


@pytest.mark.parametrize("how", ["lane", "link"])
def test_what_came_before_an_end_is_there_for_who_asks_after_it(how: str) -> None:
    with two_links() as (links, _):
        groups = groups_of(links)
        sent = torch.arange(1000, dtype=torch.float32)
        groups[0].send([sent], 1, 3).wait(SOON)
        groups[0].close() if how == "lane" else links[0].close()
        time.sleep(2)
        place = torch.zeros(1000)
        groups[1].recv([place], 0, 3).wait(SOON)
        assert torch.equal(place, sent)
        with pytest.raises(RuntimeError, match="has closed|did not come back"):
            groups[1].recv([place], 0, 3).wait(SOON)


@pytest.mark.ci
def test_the_last_message_is_acknowledged_by_who_closes_at_once() -> None:
    for _ in range(10):
        with two_links() as (links, _):
            groups = groups_of(links)
            sent = torch.ones(3 * MB, dtype=torch.uint8)
            place = torch.zeros(3 * MB, dtype=torch.uint8)
            arriving = groups[1].recv([place], 0, 0)
            work = groups[0].send([sent], 1, 0)
            arriving.wait(SOON)
            links[1].close()
            work.wait(SOON)


@pytest.mark.ci
@pytest.mark.parametrize("who", by_default([0, 1], 1))
def test_keys_change_after_the_line_was_cut(who: int) -> None:
    """Of who calls (1) and of who is called (0), while messages go."""
    pairs = pairs_of(2)
    keys = [KnownKeys(m, pairs) for m in range(2)]
    with two_links(keys, over_line=True, grace_seconds=5.0) as (links, line):
        assert line is not None
        groups = groups_of(links)
        for _ in range(2):
            line.cut()
            time.sleep(0.5)
            check(swap(groups, MB))
        for _ in range(2):
            new = zmq.curve_keypair()
            both = [keys[who].public_key, new[0]]
            for known in keys:
                known.change(who, both)
            time.sleep(1.2)
            keys[who].public_key, keys[who].secret_key = new
            keys[who].change(who, [new[0]])
            time.sleep(1.2)
            check(swap(groups, 5 * MB))
            keys[1 - who].change(who, [new[0]])
            time.sleep(1.2)
            check(swap(groups, 5 * MB))


def test_a_wait_that_was_given_up_is_forgotten() -> None:
    with two_links() as (links, _):
        links[0].serve(Shelf().serve)
        store = LinkStore(links[1], (0, 0))
        for _ in range(20):
            with pytest.raises(RuntimeError, match="did not come"):
                store.wait(["never"], timedelta(seconds=0.01))
        store.set("never", "comes")
        store.wait(["never"], SOON)
        switch: Any = links[1].__dict__["_switch"]
        assert not switch.requests.num_waiting and not switch.peers[0, 0].asked


def test_a_request_that_comes_before_who_serves_is_answered() -> None:
    with two_links() as (links, _):
        asked = links[1].ask((0, 0), b'["1", "set", "x", "1"]')
        time.sleep(0.3)
        links[0].serve(Shelf().serve)
        assert asked.result(5) == b'{"value": "1"}'


def test_messages_that_never_come_leave_nothing_behind() -> None:
    """Of a lane that was closed while they were under way; others go on and are counted."""
    with two_links() as (links, _):
        lasting = groups_of(links, "lasting")
        for number in range(5):
            groups = groups_of(links, f"lane {number}")
            groups[0].send([torch.ones(3 * MB, dtype=torch.uint8)], 1, 0)
            groups[0].close()
        for tag in range(200):
            check(swap(lasting, 1000, tag))
        until = time.monotonic() + 5
        for link in links:
            peers: Any = link.__dict__["_switch"].peers
            (mailbox,) = [peer.mailbox for peer in peers.values()]

            def left(mailbox: Any = mailbox) -> int:
                return mailbox.num_single_serials + mailbox.early_bytes + mailbox.has_outgoing

            while left() and time.monotonic() < until:
                time.sleep(0.05)
            assert left() == 0


def test_what_stands_idle_is_kept_up_by_tcp() -> None:
    with two_links() as (links, _):
        port = links[0].port
        told = subprocess.run(
            ["ss", "-tno", "state", "established"], capture_output=True, text=True
        )
        own = [line for line in told.stdout.splitlines() if f":{port} " in line + " "]
        assert len(own) >= 4 and all("timer:(" in line for line in own), told.stdout


def test_a_pause_of_ones_own_is_not_the_peers() -> None:
    """The line is cut and comes back while this process stands still for longer than the grace."""
    with two_links(over_line=True) as (links, line):
        assert line is not None
        threads: list[Any] = [*links]
        threads[1]._post(lambda: (line.cut(), time.sleep(2)))
        time.sleep(0.1)
        threads[0]._post(lambda: time.sleep(2))
        time.sleep(2.5)
        check(swap(groups_of(links), MB))


def test_a_closed_lane_is_let_go_once_nothing_reads_its_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What lies in libzmq goes out still: who uses the buffer before sends what it puts there."""
    monkeypatch.setattr(window, "LEAST_BYTES", 64 * MB)
    monkeypatch.setattr(window, "MOST_BYTES", 64 * MB)
    with two_links(over_line=True) as (links, line):
        assert line is not None
        groups = groups_of(links)
        sent = torch.full((40 * MB,), 1, dtype=torch.uint8)
        place = torch.zeros(40 * MB, dtype=torch.uint8)
        arriving = groups[0].recv([place], 1, 0)
        time.sleep(0.2)  # it is told of the place
        line.flows.clear()
        groups[1].send([sent], 0, 0)
        time.sleep(0.5)
        let_go = groups[1].close()
        with pytest.raises(WaitedTooLong):
            let_go.result(0.5)
        line.flows.set()
        let_go.result(20)
        sent.fill_(2)
        with contextlib.suppress(RuntimeError):  # or it is there, as all had been handed over
            arriving.wait(SOON)
        highest = int(place.max())
        assert highest < 2


def test_lanes_are_let_go_at_once_where_nothing_is_under_way_or_its_peer_is_gone() -> None:
    with two_links(over_line=True) as (links, line):
        assert line is not None
        groups = groups_of(links)
        check(swap(groups, 3 * MB))
        groups[1].close().result(5)
        others = groups_of(links, "another")
        line.flows.clear()
        others[1].send([torch.zeros(40 * MB, dtype=torch.uint8)], 0, 0)
        time.sleep(0.2)
        line.close()
        line.flows.set()
        others[1].close().result(10)
        links[1].close()
        others[1].close().result(5)
