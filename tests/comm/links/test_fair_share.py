"""A long message does not keep others waiting: on a line whose seconds are counted, not waited."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from dsx.comm.links import window
from dsx.comm.links.frames import CHUNK_BYTES, CLOSED, READY, Frame
from dsx.comm.links.mailbox import Mailbox

BULK, OTHER, SHORT = 1, 2, 3  # lanes
STEP_SECONDS = 0.001
TURN_BYTES = 1 << 16  # of a connection: TCP shares a line between them
MB = 1 << 20


class Line:
    """From one mailbox to the other, with a rate; answers take the latency alone."""

    def __init__(self, mbit: float, latency_seconds: float = 0.0, streams: int = 1) -> None:
        self.now, self.rate, self.latency = 0.0, mbit * 1e6 / 8, latency_seconds
        self.sender = Mailbox(0, lambda: self.now)
        self.receiver = Mailbox(1, lambda: self.now)
        self.sender.latency_seconds = 2 * latency_seconds
        self.queues: dict[int, deque[list[Any]]] = {c: deque() for c in range(streams + 1)}
        self.back: deque[tuple[float, Any]] = deque()
        self.forth: deque[tuple[float, Any]] = deque()
        self.ended: dict[int, float] = {}  # by lane
        self.num_passed = 0
        self.left = 0.0
        self.turn = 0

    def post(self, lane: int, num_bytes: int) -> None:
        def end(error: Exception | None) -> None:
            assert error is None
            self.ended[lane] = self.now

        self.sender.send(lane, 0, memoryview(bytes(num_bytes)), lambda error: None)
        self.receiver.receive(lane, 0, memoryview(bytearray(num_bytes)), end)

    def run(self, until: float) -> None:
        while self.now < until:
            self.now += STEP_SECONDS
            for connection, queue in self.queues.items():
                while (found := self.sender.next_chunk(connection)) is not None:
                    queue.append([*found, len(found[1])])
            self.left += self.rate * STEP_SECONDS
            self.pass_bytes()
            while self.forth and self.forth[0][0] <= self.now:
                self.receiver.take_chunk(*self.forth.popleft()[1])
            self.answer()

    def pass_bytes(self) -> None:
        while self.left > 0 and any(self.queues.values()):
            self.turn = (self.turn + 1) % len(self.queues)
            queue = self.queues[self.turn]
            if queue:
                num = min(queue[0][2], TURN_BYTES, int(self.left) + 1)
                queue[0][2] -= num
                self.left -= num
                self.num_passed += num
                if not queue[0][2]:
                    frame, body, _ = queue.popleft()
                    self.forth.append((self.now + self.latency, (frame, body)))
        self.left = min(self.left, self.rate * STEP_SECONDS)

    def answer(self) -> None:
        receiver = self.receiver
        self.back += [
            (self.now + self.latency, said) for said in (*receiver.replies, receiver.acks)
        ]
        receiver.replies, receiver.acks = [], []
        while self.back and self.back[0][0] <= self.now:
            said = self.back.popleft()[1]
            if isinstance(said, list):
                self.sender.take_acks(said)
            else:
                frame: Frame = said[0]
                assert frame.kind in (READY, CLOSED)
                self.sender.take_ready(frame)


def waited(line: Line, lane: int, num_bytes: int) -> float:
    """Return the seconds that a message takes which is posted now, beside what is under way."""
    line.ended.pop(lane, None)
    began = line.now
    line.post(lane, num_bytes)
    while lane not in line.ended:
        line.run(line.now + 0.01)
        assert line.now < began + 60
    return line.ended[lane] - began


@pytest.mark.parametrize(("mbit", "latency", "streams"), [
    (50, 0.0, 1), (200, 0.0, 1), (200, 0.02, 4), (1000, 0.05, 1),
])  # fmt: skip
def test_others_wait_for_a_moment_of_the_line_and_short_ones_for_nobody(
    mbit: float, latency: float, streams: int
) -> None:
    line = Line(mbit, latency, streams)
    line.post(BULK, round(line.rate * 8))
    line.run(3.0)
    turn = CHUNK_BYTES / line.rate
    queue = max(window.QUEUE_SECONDS + 4 * latency, streams * window.LEAST_BYTES / line.rate)
    for num_bytes in (3 * MB, 10 * MB):
        chunks = num_bytes / CHUNK_BYTES
        own = 2 * latency + 2 * chunks * turn  # the two share the line
        assert waited(line, OTHER, num_bytes) < 2 * latency + 1.3 * queue + own + 4 * turn
    for num_bytes in (8, 48, 60_000):
        shared = (streams + 1) * (num_bytes + 2 * TURN_BYTES) / line.rate
        assert waited(line, SHORT, num_bytes) < latency + shared + 0.03


@pytest.mark.parametrize(("mbit", "latency"), [(20, 0.0), (200, 0.01), (1000, 0.0), (1000, 0.05)])
def test_the_line_is_full_meanwhile(mbit: float, latency: float) -> None:
    line = Line(mbit, latency)
    line.post(BULK, round(line.rate * 6))
    line.run(2.0)
    before = line.num_passed
    line.run(5.0)
    assert line.num_passed - before > 0.99 * 3.0 * line.rate


def test_with_as_much_under_way_on_any_line_they_would_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is measured is what bounds the wait above."""
    monkeypatch.setattr(window, "LEAST_BYTES", 16 * MB)
    line = Line(50)
    line.post(BULK, round(line.rate * 20))
    line.run(3.0)
    assert waited(line, OTHER, 3 * MB) > 2.5
    assert waited(line, SHORT, 48) < 0.1


def test_many_messages_take_turns() -> None:
    """Of equal length: the last one to end is not twice as late as the first one."""
    line = Line(200)
    for lane in range(10, 18):
        line.post(lane, 4 * MB)
    line.run(4.0)
    ends = [line.ended[lane] for lane in range(10, 18)]
    assert max(ends) < 1.2 * min(ends)
