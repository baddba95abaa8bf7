"""Two connections joined, without a process around them."""

from __future__ import annotations

import socket
import time

import pytest

from dsx.comm.links import joined
from dsx.comm.links.event_loop import EventLoop
from dsx.comm.links.joined import Bucket, Joined, Pipes


class Bench:
    """A pair of connections joined by a loop that runs when it is asked to."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.bucket = Bucket(self.loop)
        self.caller, outside = socket.socketpair()
        self.rank, inside = socket.socketpair()
        self.ended: list[Joined] = []
        for each in (outside, inside):
            each.setblocking(False)
        self.joined = Joined(self.loop, Pipes(), outside, inside, self.bucket, self.ended.append)

    def run(self, seconds: float) -> None:
        """Serve for so long, or until the connections have ended."""
        self.loop.after(seconds, lambda: None)  # it wakes up by then
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.ended:
            self.loop._turn()  # pyright: ignore[reportPrivateUsage]

    def close(self) -> None:
        self.joined.close()
        for each in (self.caller, self.rank):
            each.close()
        self.loop.close()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_half_a_connection_on_which_nothing_comes_is_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "_HALF_SECONDS", 1.0)
    bench.caller.sendall(b"question")
    bench.caller.shutdown(socket.SHUT_WR)
    for _ in range(3):  # as long as something comes it stays
        bench.run(0.4)
        bench.rank.sendall(b"more")
        assert not bench.ended
    bench.run(3)
    assert bench.ended == [bench.joined]
    assert bench.joined.num_bytes == (8, 12)
    bench.close()


def test_an_end_or_a_close_ends_both_and_is_told_once(bench: Bench) -> None:
    bench.caller.close()
    bench.rank.close()
    bench.run(5)
    bench.joined.close()
    assert bench.ended == [bench.joined]
    bench.close()


def test_what_waits_for_the_rate_is_closed_with_its_connection(bench: Bench) -> None:
    bench.bucket.set_rate(10_000)
    bench.rank.sendall(bytes(100_000))
    bench.run(0.6)
    assert 0 < bench.joined.num_bytes[1] <= 10_000
    bench.joined.close()
    bench.ended.clear()
    bench.run(0.1)  # its turn comes, and it is gone
    bench.close()
