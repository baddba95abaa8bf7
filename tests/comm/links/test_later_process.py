"""What a process has sent before it ended says nothing of the one that takes its place."""

from __future__ import annotations

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
