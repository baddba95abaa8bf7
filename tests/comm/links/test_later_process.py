"""What a process has sent before it ended says nothing of the one that takes its place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import zmq

from dsx.comm.links.frames import CLOSED, PROBE, Frame, Key
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.pace import Pace
from dsx.comm.links.switch import Switch

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
