"""What one process sends another when: signs of life, acknowledgements."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dsx.comm.links import peer as peers
from dsx.comm.links.frames import ACKS, DATA, PROBE, Ack, Frame, Key
from dsx.comm.links.pace import Pace
from dsx.comm.links.peer import Peer

SUSPECT_SECONDS = 20.0


class Lent:
    """What libzmq has taken a copy of."""

    done = True


class Sent:
    """A connection that keeps what is sent."""

    number, key = 1, None

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def send(self, head: bytes, body: Any) -> bool:
        return self.lend(head, body) is not None

    def lend(self, head: bytes, body: Any) -> Any:
        self.frames.append(Frame.read(head, len(body)))
        return Lent()

    def count(self, kind: int) -> int:
        return sum(frame.kind == kind for frame in self.frames)


class Clock:
    """Seconds, and a peer with its connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(peers.time, "monotonic", lambda: self.now)
        self.peer = Peer(0, 1, 0, 0.7, SUSPECT_SECONDS)
        self.short, self.long = Sent(), Sent()
        connections: list[Any] = [self.short, self.long]
        for index, connection in enumerate(connections):
            self.peer.open(index, connection)

    def pass_seconds(self, seconds: float, hears: bool) -> None:
        for _ in range(round(seconds * 20)):
            self.now += 0.05
            if hears:
                self.peer.heard()
            assert self.peer.look(self.now) is None
            self.peer.flush(Pace(None))

    def take(self, num_bytes: int, serial: int) -> None:
        frame = Frame(DATA, 1, Key(5, 0, serial), serial=serial, total=num_bytes)
        self.peer.mailbox.take_chunk(frame, memoryview(bytes(num_bytes)))
        self.peer.flush(Pace(None))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_who_is_heard_is_not_probed_and_who_is_silent_is_now_and_then(clock: Clock) -> None:
    clock.pass_seconds(3, hears=True)
    assert clock.short.count(PROBE) == 8  # for the time there and back
    clock.pass_seconds(60, hears=True)
    assert clock.short.count(PROBE) == 8
    clock.pass_seconds(18, hears=False)
    assert clock.short.count(PROBE) == 8 + 3


def test_a_probe_tells_how_far_messages_have_arrived(clock: Clock) -> None:
    clock.pass_seconds(3, hears=True)
    clock.peer.mailbox.send(5, 0, memoryview(b"short"), lambda error: None)
    clock.pass_seconds(1, hears=True)
    (chunk,) = [f for f in clock.long.frames + clock.short.frames if f.kind == DATA]
    clock.peer.mailbox.take_acks([Ack(chunk.serial, 0, True)])
    clock.pass_seconds(30, hears=True)
    assert clock.short.count(PROBE) == 9 and clock.short.frames[-1].serial == 1


def test_acknowledgements_that_nobody_waits_for_go_together(clock: Clock) -> None:
    for serial in range(5):
        clock.take(100, serial)
    assert clock.short.count(ACKS) == 0
    clock.pass_seconds(0.2, hears=True)
    assert clock.short.count(ACKS) == 1
    clock.take(100_000, 5)  # its sender waits
    assert clock.short.count(ACKS) == 2
    for serial in range(6, 6 + 16):
        clock.take(100, serial)
    assert clock.short.count(ACKS) == 3
    clock.pass_seconds(1, hears=True)
    assert clock.short.count(ACKS) == 3


def test_a_connection_that_closes_while_it_is_made_anew_is_no_loss(clock: Clock) -> None:
    clock.peer.take_again(is_renewing=True)
    clock.peer.close(0)
    clock.pass_seconds(SUSPECT_SECONDS - 0.1, hears=False)  # in which it calls, or is silent
    clock.now += 0.2
    assert "nothing was heard" in str(clock.peer.look(clock.now))
    anew: Any = Sent()
    clock.peer.open(0, anew)
    clock.pass_seconds(1.0, hears=True)
    clock.peer.close(0)  # for another reason
    clock.now += 1.0
    assert "did not come back" in str(clock.peer.look(clock.now))


def test_one_whose_connection_0_has_never_stood_is_lost_with_the_last_other_one(
    clock: Clock,
) -> None:
    peer, connection = Peer(0, 2, 0, 0.7, SUSPECT_SECONDS), clock.long
    assert peer.look(clock.now + 2 * SUSPECT_SECONDS) is None  # it has not begun
    anew: Any = connection
    peer.open(1, anew)
    peer.open(2, anew)
    peer.close(1)
    assert peer.look(clock.now + 1) is None
    peer.close(2)
    assert peer.look(clock.now + 0.6) is None
    assert "did not come back within 0.7 s" in str(peer.look(clock.now + 0.8))
    peer.open(1, anew)
    assert peer.look(clock.now + 0.8) is None and not peer.is_met
    assert "nothing was heard" in str(peer.look(clock.now + SUSPECT_SECONDS + 1))
    peer.open(0, anew)
    peer.close(1)
    assert peer.look(clock.now + 0.8) is None and peer.is_met


def test_a_closed_connection_may_be_away_for_as_long_as_round_trips_take_now(clock: Clock) -> None:
    """Of a host that has become busy; one that stood still for once says nothing."""

    def lasts(*round_trips: float) -> float:
        for seconds in round_trips:
            frame = Frame(PROBE, 1, total=time.monotonic_ns() - round(1e9 * seconds))
            clock.peer.answer_probe(frame)
        clock.peer.close(0)
        closed_at = clock.now
        while clock.peer.look(clock.now) is None:
            clock.now += 0.01
        clock.peer.open(0, connection)
        return clock.now - closed_at

    connection: Any = clock.short
    assert lasts() == pytest.approx(0.7, abs=0.02)
    assert lasts(0.1) == pytest.approx(1.3, abs=0.05)
    assert lasts(0.1, 0.1, 0.3, 0.3, 0.3) == pytest.approx(2.5, abs=0.05)
    assert lasts(0.1, 0.1, 0.1, 0.1, 30.0) == pytest.approx(1.3, abs=0.05)
