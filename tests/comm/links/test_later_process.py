"""What a process has sent before it ended says nothing of the one that takes its place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from dsx.comm.links.frames import CLOSED, PROBE, Frame, Key
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.pace import Pace
from dsx.comm.links.switch import Switch
from tests.comm.links.clusters import KnownKeys, Line, pairs_of

HERE, THERE = (0, 0), (1, 0)
LANE = 7


def pump(switch: Switch, without: Any = None) -> None:
    """Take what has come, but on one socket."""
    ready = dict(switch.poller.poll(5))
    switch.take({each: event for each, event in ready.items() if each is not without})


def until(is_so: Callable[[], bool], *do: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        for each in do:
            each()


def test_last_words_of_the_one_before_are_not_taken_for_the_new_ones() -> None:
    """They wait in the socket that had called it, while the new one calls."""
    here, before = (Switch(name, None, LinkOptions(), Pace(None)) for name in (HERE, THERE))
    here.readmits = True
    here.expect(THERE, f"127.0.0.1:{before.port}", None)
    old = here.peer(THERE)
    until(lambda: old.is_there and before.peer(HERE).is_there, lambda: pump(here),
          lambda: pump(before))  # fmt: skip
    (called,) = (each for each, call in here._calls.by_socket.items() if call.index == 0)
    of_before = before.peer(HERE)
    of_before.say(Frame(PROBE, 1, start=time.monotonic_ns(), serial=1000), b"")
    of_before.say(Frame(CLOSED, 1, Key(LANE, 0, 0)), b"")
    until(lambda: bool(called.getsockopt(zmq.EVENTS) & zmq.POLLIN), lambda: pump(here, called))

    now = Switch(THERE, None, LinkOptions(), Pace(None))
    now.expect(HERE, f"127.0.0.1:{here.port}", None)
    until(lambda: here.peer(THERE) is not old and here.peer(THERE).is_there,
          lambda: pump(here, called), lambda: pump(now))  # fmt: skip
    until(lambda: not called.getsockopt(zmq.EVENTS) & zmq.POLLIN, lambda: pump(here))

    place, ends = bytearray(8), list[Any]()
    here.peer(THERE).mailbox.receive(LANE, 0, memoryview(place), ends.append)
    now.peer(HERE).mailbox.send(LANE, 0, memoryview(b"its word"), lambda error: None)
    until(lambda: bool(ends), lambda: pump(here), lambda: pump(now))
    assert ends == [None] and bytes(place) == b"its word"
    for switch in (before, now, here):
        switch.end("over")


@contextmanager
def over_a_line() -> Generator[tuple[list[Switch], Line]]:
    """The second calls the first; both, and others that are added, are ended whatever happens."""
    pairs = pairs_of(2)
    switches = [Switch((m, 0), KnownKeys(m, pairs), LinkOptions(), Pace(None)) for m in (0, 1)]
    here, there = switches
    line = Line(here.port)
    try:
        there.expect(HERE, line.address, None)
        until(lambda: here.peer(THERE).is_there and there.peer(HERE).is_there,
              lambda: pump(here), lambda: pump(there))  # fmt: skip
        yield switches, line
    finally:
        line.close()
        for switch in switches:
            switch.end("over")


@pytest.mark.parametrize("index", [0, 1])
def test_a_call_that_libzmq_has_ended_is_made_anew(index: int) -> None:
    """What cannot be read ends it for good; the peer need not be silent for long before."""
    with over_a_line() as ((here, there), line):
        both = (lambda: pump(here), lambda: pump(there))
        began, before = time.monotonic(), dict(there.peer(HERE).connections)
        line.garbles = 1  # of what comes first: the other connection may have something to say
        here.peer(THERE).connections[index].send(Frame(PROBE, 0).pack(0), b"")
        until(lambda: dict(there.peer(HERE).connections) != before, *both)
        until(lambda: there.peer(HERE).is_there and here.peer(THERE).is_there, *both)
        assert there.peer(HERE).error is None
        assert time.monotonic() - began < LinkOptions().suspect_seconds / 3


def test_a_later_process_is_called_where_libzmq_has_ended_the_calls_of_the_one_before() -> None:
    with over_a_line() as (switches, line):
        before, there = switches
        there.readmits = True
        line.garbles = 2
        for index in (0, 1):
            before.peer(THERE).connections[index].send(Frame(PROBE, 0).pack(0), b"")
        until(lambda: not line.garbles, lambda: pump(before))
        line.is_open = False
        until(lambda: not there.peer(HERE).connections, lambda: pump(there))
        there.give_up(there.peer(HERE), "it is lost")
        keys, options = before._trust, LinkOptions(port=before.port)
        before.end("killed")
        line.is_open = True
        now = Switch(HERE, keys, options, Pace(None))
        switches.append(now)
        until(lambda: there.peer(HERE).is_there, lambda: pump(now), lambda: pump(there))
        assert there.peer(HERE).incarnation == now.incarnation


def test_who_was_not_let_in_calls_until_it_is() -> None:
    """What changes meanwhile is the other side's list of keys."""
    pairs = pairs_of(2)
    keys = KnownKeys(0, pairs)
    keys.change(1, [])
    here = Switch(HERE, keys, LinkOptions(), Pace(None))
    there = Switch(THERE, KnownKeys(1, pairs), LinkOptions(), Pace(None))
    try:
        there.expect(HERE, f"127.0.0.1:{here.port}", None)
        refused = "a key of no member"
        until(lambda: here.dropped.counts[refused] > 4, lambda: pump(here), lambda: pump(there))
        assert max(call.num_vain for call in there._calls.by_socket.values()) > 0
        keys.change(1, [pairs[1][0]])
        until(lambda: there.peer(HERE).is_there, lambda: pump(here), lambda: pump(there))
    finally:
        for switch in (here, there):
            switch.end("over")


def two_that_have_met() -> tuple[Switch, Switch]:
    """The first is called by the second, and asks for no sign of life."""
    here, there = (Switch(name, None, LinkOptions(), Pace(None)) for name in (HERE, THERE))
    there.expect(HERE, f"127.0.0.1:{here.port}", None)
    until(lambda: here.peer(THERE).is_there and there.peer(HERE).is_there,
          lambda: pump(here), lambda: pump(there))  # fmt: skip
    here.peer(THERE)._probe_at = math.inf
    return here, there


def test_who_is_called_sees_that_its_caller_has_ended_though_it_sends_nothing() -> None:
    here, there = two_that_have_met()
    there._context.destroy(0)
    until(lambda: not here.peer(THERE).connections, lambda: pump(here))
    until(lambda: here.peer(THERE).error is not None, lambda: pump(here))
    assert "was closed and did not come back" in str(here.peer(THERE).error)
    here.end("over")


def test_what_a_caller_has_sent_before_it_ended_is_taken() -> None:
    here, there = two_that_have_met()
    count, place, ends = 600, bytearray(8), list[Any]()
    for tag in range(count):
        there.peer(HERE).mailbox.send(LANE, tag, memoryview(b"its word"), lambda error: None)
        there.take({})
    there._context.destroy(1000)
    until(lambda: bool(here._callers.monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN), lambda: None)
    until(lambda: not here.peer(THERE).connections, lambda: pump(here))
    here.peer(THERE).mailbox.receive(LANE, count - 1, memoryview(place), ends.append)
    assert ends == [None] and bytes(place) == b"its word"
    here.end("over")
