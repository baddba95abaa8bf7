"""Links between two ranks: who is let in, what a cut costs, how a loss is noticed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import pytest
import torch
import zmq

from dsx.comm.links import sockets
from dsx.comm.links.frames import DATA, HELLO, Frame
from dsx.comm.links.group import LinkGroup
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.peer import LinkDown
from dsx.core.membership import Seat
from tests.comm.links.clusters import (
    SOON,
    KnownKeys,
    Line,
    check,
    groups_of,
    pairs_of,
    swap,
    two_links,
)

MB = 1 << 20


@pytest.mark.parametrize("streams", [1, 3])
def test_messages_of_all_sizes_come_as_they_were(streams: int) -> None:
    with two_links(streams=streams) as (links, _):
        groups, others = groups_of(links), groups_of(links, "another lane")
        works = [
            work
            for length in (1, 100, 65_536, 65_537, 3 * MB + 5, 40 * MB)
            for each in (groups, others)
            for work in swap(each, length, tag=length % 3)
        ]
        check(works)
        assert not links[0].problems and not links[1].problems
        assert 0 < links[0].latency_seconds((1, 0)) < 1
        other, figures = links[1].figures((0, 0)), links[0].figures((1, 0))
        assert figures is not None and other is not None and links[0].figures((2, 0)) is None
        assert 0 < figures.least_seconds <= figures.last_seconds < 1
        messages = 2 * (101 + 65_536 + 65_537 + 43 * MB + 5)  # on two lanes
        assert messages <= figures.sent_bytes < messages + MB / 8
        assert messages <= other.received_bytes <= figures.sent_bytes


def test_a_place_may_come_long_after_the_message() -> None:
    with two_links() as (links, _):
        groups = groups_of(links)
        sent = torch.arange(5 * MB, dtype=torch.uint8)
        work = groups[0].send([sent], 1, 0)
        with pytest.raises(RuntimeError, match="nothing has come"):
            work.wait(timedelta(seconds=0.5))
        place = torch.zeros(5 * MB, dtype=torch.uint8)
        groups[1].recv([place], 0, 0).wait(SOON)
        work.wait(SOON)
        assert torch.equal(place, sent)


def test_a_reset_costs_a_resend_and_no_more() -> None:
    with two_links(over_line=True, grace_seconds=5.0) as (links, line):
        assert line is not None
        groups = groups_of(links)
        for _ in range(4):
            works = swap(groups, 30 * MB)
            time.sleep(0.03)
            line.cut()
            check(works)
        assert links[0].problems == links[1].problems == {}


def test_a_connection_that_does_not_come_back_is_gone_within_a_second() -> None:
    with two_links(over_line=True) as (links, line):
        assert line is not None
        works = swap(groups_of(links), 30 * MB)
        started = time.monotonic()
        line.close()
        for work, _, _ in works:
            with pytest.raises(RuntimeError, match=r"closed and did not come back within \d\.\d s"):
                work.wait(SOON)
        assert time.monotonic() - started < 6  # 0.7 s and what a busy machine adds
        with pytest.raises(LinkDown):
            links[0].wait_for(1, 0, 5)


def test_nothing_readable_is_on_the_line() -> None:
    secret = b"these are the weights of a model" * 1000
    for encrypted in (False, True):
        pairs = pairs_of(2)
        keys = [KnownKeys(m, pairs) for m in range(2)]
        given = keys if encrypted else [None, None]
        links = [Link(m, 0, given[m], LinkOptions()) for m in range(2)]
        line = Line(links[0].port)
        links[0].expect(1, 0, None)
        links[1].expect(0, 0, line.address)
        for m in range(2):
            links[m].wait_for(1 - m, 0, 20)
        groups = groups_of(links)
        place = torch.zeros(len(secret), dtype=torch.uint8)
        work = groups[1].recv([place], 0, 0)
        groups[0].send([torch.frombuffer(bytearray(secret), dtype=torch.uint8)], 1, 0).wait(SOON)
        work.wait(SOON)
        assert place.numpy().tobytes() == secret
        assert (b"weights of a model" in line.passed) == (not encrypted)
        assert (b"incarnation" in line.passed) == (not encrypted)
        for link in links:
            link.close()
        line.close()


@pytest.mark.parametrize("case", ["no key", "key of nobody", "key of another server"])
def test_strangers_are_not_let_in(case: str) -> None:
    pairs = pairs_of(3)
    own = KnownKeys(0, {0: pairs[0], 1: pairs[1]})
    host = Link(0, 0, own, LinkOptions())
    theirs: KnownKeys | None = KnownKeys(1, {0: pairs[0], 1: pairs[2]})
    if case == "no key":
        theirs = None
    if case == "key of another server":
        theirs = KnownKeys(1, {0: pairs[2], 1: pairs[1]})
    stranger = Link(1, 0, theirs, LinkOptions())
    try:
        host.expect(1, 0, None)
        stranger.expect(0, 0, f"127.0.0.1:{host.port}")
        with pytest.raises(TimeoutError, match="no link to cluster 0") as caught:
            stranger.wait_for(0, 0, 2)
        with pytest.raises(TimeoutError):
            host.wait_for(1, 0, 0.1)
        if case == "key of nobody":
            assert "does not take this cluster's key" in str(caught.value)
            assert host.problems["a key of no member"] > 0
    finally:
        host.close()
        stranger.close()


def test_a_member_that_speaks_as_another_is_dropped() -> None:
    pairs = pairs_of(3)
    host = Link(0, 0, KnownKeys(0, pairs), LinkOptions())
    context = zmq.Context()
    liar = context.socket(zmq.DEALER)
    liar.curve_serverkey = pairs[0][0]
    liar.curve_publickey, liar.curve_secretkey = pairs[1]
    liar.connect(f"tcp://127.0.0.1:{host.port}")
    try:
        body = b'{"rank": 0, "connection": 0, "number": 1, "incarnation": 5}'
        liar.send_multipart([Frame(HELLO, 2).pack(len(body)), body])
        liar.send_multipart([Frame(DATA, 1, total=3).pack(3), b"123"])
        liar.send_multipart([b"rubbish", b""])
        liar.send_multipart([b"one", b"two", b"three parts"])
        until = time.monotonic() + 10
        while sum(host.problems.values()) < 4 and time.monotonic() < until:
            time.sleep(0.02)
        assert host.problems == {
            "a frame that says another sender": 1,
            "a frame before a greeting": 1,
            "a head that is cut short": 1,
            "a message of 3 parts": 1,
        }
    finally:
        host.close()
        context.destroy(0)


def test_a_revoked_key_is_out_within_two_seconds_and_a_new_one_is_taken() -> None:
    pairs = pairs_of(2)
    keys = [KnownKeys(m, pairs) for m in range(2)]
    with two_links(keys) as (links, _):
        groups = groups_of(links)
        check(swap(groups, MB))
        new = zmq.curve_keypair()  # cluster 1 changes its key: both are known for a while
        keys[0].change(1, [pairs[1][0], new[0]])
        keys[1].change(1, [pairs[1][0], new[0]])
        check(swap(groups, MB))
        keys[1].public_key, keys[1].secret_key = new
        keys[1].change(1, [new[0]])
        check(swap(groups, MB))
        keys[0].change(1, [new[0]])
        time.sleep(1.5)
        check(swap(groups, MB))
        keys[0].change(1, [])
        started = time.monotonic()
        place = torch.zeros(MB, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="its key has been revoked"):
            groups[0].recv([place], 1, 0).wait(SOON)
        assert time.monotonic() - started < 3


SILENT = """
import sys, time
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
link = Link(1, 0, None, LinkOptions())
link.expect(0, 0, sys.argv[1])
link.wait_for(0, 0, 20)
print("there", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def another_process(suspect_seconds: float) -> Generator[tuple[Link, subprocess.Popen[str]]]:
    """Yield a link and a process that it has met, which does nothing."""
    link = Link(0, 0, None, LinkOptions(suspect_seconds=suspect_seconds))
    link.expect(1, 0, None)
    command = [sys.executable, "-c", SILENT, f"127.0.0.1:{link.port}"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "there\n"
        link.wait_for(1, 0, 20)
        yield link, other
    finally:
        other.kill()
        other.wait()
        assert other.stdout is not None
        other.stdout.close()
        link.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_has_gone_or_is_silent_is_noticed(how: signal.Signals) -> None:
    with another_process(suspect_seconds=1.5) as (link, other):
        group = LinkGroup(link, "a lane", Seat.of(0, 2))
        work = group.recv([torch.zeros(10, dtype=torch.uint8)], 1, 0)
        os.kill(other.pid, how)
        started = time.monotonic()
        why = "closed and did not come back" if how == signal.SIGKILL else "nothing was heard"
        with pytest.raises(RuntimeError, match=why):
            work.wait(SOON)
        seconds = time.monotonic() - started
        assert seconds < 8  # 0.7 or 1.5 s, and what a busy machine adds


def test_silence_that_ends_in_time_changes_nothing() -> None:
    with another_process(suspect_seconds=6) as (link, other):
        os.kill(other.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(other.pid, signal.SIGCONT)
        time.sleep(0.5)
        link.wait_for(1, 0, 1)


def test_another_process_of_the_same_name_is_not_taken() -> None:
    first, host = Link(1, 0, None, LinkOptions()), Link(0, 0, None, LinkOptions())
    host.expect(1, 0, None, first.incarnation)
    first.expect(0, 0, f"127.0.0.1:{host.port}", host.incarnation)
    host.wait_for(1, 0, 20)
    second = Link(1, 0, None, LinkOptions())
    try:
        second.expect(0, 0, f"127.0.0.1:{host.port}")
        with pytest.raises(TimeoutError):
            second.wait_for(0, 0, 1)
        check(swap(groups_of([host, first]), MB))
        assert host.problems["a greeting of another process than the one that is meant"] > 0
    finally:
        for link in (first, second, host):
            link.close()


def test_while_clusters_meet_a_process_that_is_started_again_takes_its_own_place() -> None:
    """Once the earlier one is gone; who comes after one that lives does not."""
    pairs = pairs_of(2)
    host = Link(0, 0, KnownKeys(0, pairs), LinkOptions())
    host.expect(1, 0, None)
    links = [host]

    def start() -> Link:
        links.append(Link(1, 0, KnownKeys(1, pairs), LinkOptions()))
        links[-1].expect(0, 0, f"127.0.0.1:{host.port}")
        return links[-1]

    try:
        first = start()
        first.wait_for(0, 0, 20)
        with pytest.raises(TimeoutError):
            start().wait_for(0, 0, 1)
        links.pop().close()
        first.close()
        until = time.monotonic() + 10
        while not host.why_gone((1, 0)) and time.monotonic() < until:
            time.sleep(0.02)
        second = start()
        second.wait_for(0, 0, 20)
        host.wait_for(1, 0, 20)
        host.expect(1, 0, None, second.incarnation)  # as once all have met
        check(swap(groups_of([host, second]), MB))
    finally:
        for link in links:
            link.close()


def test_a_port_that_is_taken_is_named() -> None:
    link = Link(0, 0, None, LinkOptions())
    try:
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{link.port}"):
            Link(1, 0, None, LinkOptions(port=link.port))
    finally:
        link.close()


@pytest.mark.parametrize("step", ["Door", "listen"])
def test_a_link_that_cannot_be_made_leaves_nothing_to_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It would wait there for sockets that nobody closes, in whatever runs then."""
    made: list[Any] = []

    class Noted(zmq.Context):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    def fail(*_: Any) -> Any:
        raise RuntimeError("cannot")

    monkeypatch.setattr(zmq, "Context", Noted)
    monkeypatch.setattr(sockets, step, fail)
    pairs = pairs_of(1)
    with pytest.raises(RuntimeError, match="cannot"):
        Link(0, 0, KnownKeys(0, pairs), LinkOptions())
    assert [context.closed for context in made] == [True]
