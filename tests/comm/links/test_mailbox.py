"""Messages arrive whole, once and where they belong, whatever connections do to frames."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.comm.links import frames, mailbox, messages, window
from dsx.comm.links.frames import CLOSED, READY, Ack, BadFrame, Frame, Key, read_acks
from dsx.comm.links.mailbox import Mailbox

LANE = 7


class Wire:
    """Two mailboxes and connections between them that lose and swap what they carry."""

    def __init__(self, seed: int, connections: int) -> None:
        self.random = random.Random(seed)
        self.boxes = [Mailbox(0), Mailbox(1)]
        self.under_way: dict[tuple[int, int], list[object]] = {
            (to, c): [] for to in range(2) for c in range(connections + 1)
        }
        self.connections = range(1, connections + 1)

    def step(self) -> None:
        """Send something, deliver something, or lose a connection with all it carries."""
        choice = self.random.random()
        if choice < 0.03:
            self.lose(self.random.choice([0, *self.connections]))
        elif choice < 0.5:
            self.send(self.random.randrange(2), self.random.choice([0, *self.connections]))
        else:
            self.deliver(*self.random.choice(list(self.under_way)))

    def send(self, sender: int, connection: int) -> None:
        box, to = self.boxes[sender], 1 - sender
        found = box.next_chunk(connection)
        if found is not None:
            frame, body = found
            self.under_way[to, connection].append((packed(frame, body), bytes(body)))
        for frame, body in box.replies:
            self.under_way[to, 0].append((packed(frame, body), body))
        if box.acks:
            self.under_way[to, 0].append(frames.pack_acks(box.acks))
        box.replies, box.acks = [], []

    def deliver(self, to: int, connection: int) -> None:
        queue, box = self.under_way[to, connection], self.boxes[to]
        if not queue:
            return
        each = queue.pop(0)
        if isinstance(each, bytes):
            box.take_acks(read_acks(each))
            return
        assert isinstance(each, tuple)
        head, body = each
        frame = Frame.read(head, len(body))
        if frame.kind == READY:
            box.take_ready(frame)
        elif frame.kind == CLOSED:
            box.take_closed(frame, RuntimeError("closed"))
        else:
            box.take_chunk(frame, body)
        assert not box.problems

    def lose(self, connection: int) -> None:
        """As peers do: with connection 0 go acknowledgements, so all is sent again."""
        for to in range(2):
            self.under_way[to, connection].clear()
        lost = [connection] if connection else [0, *self.connections]
        for box in self.boxes:
            for each in lost:
                box.connection_lost(each)


def packed(frame: Frame, body: bytes | memoryview) -> bytes:
    return frame.pack(len(body))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (frames, mailbox, messages):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4, raising=False)
        monkeypatch.setattr(module, "EAGER_BYTES", 8, raising=False)
    monkeypatch.setattr(mailbox, "COPIED_BYTES", 6)
    monkeypatch.setattr(mailbox, "EARLY_BYTES", 16)
    monkeypatch.setattr(mailbox, "SHORT_WINDOW_BYTES", 12)
    monkeypatch.setattr(window, "LEAST_BYTES", 8)
    monkeypatch.setattr(window, "MOST_BYTES", 12)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40)), min_size=1, max_size=12),
    connections=st.integers(1, 3),
)
def test_all_arrive(seed: int, lengths: list[tuple[int, int]], connections: int) -> None:
    wire = Wire(seed, connections)
    posts: list[tuple[str, int, int, int]] = []
    for index, (sender, length) in enumerate(lengths):
        tag = index % 3
        posts += [("send", sender, tag, length), ("receive", 1 - sender, tag, length)]
    expected: dict[tuple[int, int], list[bytes]] = {}
    places: dict[tuple[int, int], list[bytearray]] = {}
    ended: list[Exception | None] = []
    waiting = [*posts]
    while waiting or len(ended) < len(posts):
        if waiting and wire.random.random() < 0.2:
            verb, who, tag, length = waiting.pop(0)
            box = wire.boxes[who]
            if verb == "send":
                data = wire.random.randbytes(length)
                expected.setdefault((1 - who, tag), []).append(data)
                box.send(LANE, tag, memoryview(bytearray(data)), ended.append)
            else:
                places.setdefault((who, tag), []).append(bytearray(length))
                place = memoryview(places[who, tag][-1])
                box.receive(LANE, tag, place, ended.append)
        wire.step()
    assert ended == [None] * len(posts)
    assert {key: [bytes(p) for p in each] for key, each in places.items()} == expected


def test_a_message_of_another_length_is_an_error_and_not_a_truth() -> None:
    wire, ended = Wire(0, 1), list[Exception | None]()
    wire.boxes[0].send(LANE, 0, memoryview(b"12345678"), ended.append)
    wire.boxes[1].receive(LANE, 0, memoryview(bytearray(7)), ended.append)
    wire.send(0, 1)
    wire.deliver(1, 1)
    assert [str(error) for error in ended] == ["8 bytes came for 7"]


def test_a_closed_lane_ends_what_waits_there_once_all_that_was_sent_has_come() -> None:
    wire, ended, place = Wire(0, 1), list[Exception | None](), bytearray(5)
    wire.boxes[0].send(LANE, 0, memoryview(b"12345"), ended.append)  # short: sent, for its sender
    wire.boxes[0].close_lane(LANE, RuntimeError("closed"))
    wire.boxes[1].receive(LANE, 0, memoryview(place), ended.append)
    wire.boxes[1].receive(LANE, 0, memoryview(bytearray(5)), ended.append)
    for _ in range(4):
        for sender in range(2):
            wire.send(sender, 1)
        for key in wire.under_way:
            wire.deliver(*key)
    assert ended[:2] == [None, None] and bytes(place) == b"12345"
    assert str(ended[2]) == "closed"
    wire.boxes[1].send(LANE, 0, memoryview(b"1"), ended.append)
    assert str(ended[3]) == "closed"


def test_what_has_no_place_is_bounded() -> None:
    wire, ended = Wire(0, 1), list[Exception | None]()
    for tag in range(1, 9):
        wire.boxes[0].send(LANE, tag, memoryview(bytes(7 * [tag])), ended.append)
    for _ in range(40):
        wire.send(0, 1)
        wire.deliver(1, 1)
        wire.send(1, 1)
        wire.deliver(0, 0)
    assert 0 < wire.boxes[1].early_bytes <= 16
    places = {tag: bytearray(7) for tag in range(1, 9)}
    for tag, place in places.items():
        wire.boxes[1].receive(LANE, tag, memoryview(place), ended.append)
    for _ in range(200):
        wire.send(0, 1)
        wire.send(1, 1)
        for key in wire.under_way:
            wire.deliver(*key)
    assert wire.boxes[1].early_bytes == 0
    assert ended == [None] * 16 and all(set(place) == {tag} for tag, place in places.items())


@given(head=st.binary(max_size=100), body=st.integers(0, 1 << 23))
def test_what_is_no_frame_is_refused(head: bytes, body: int) -> None:
    try:
        frame = Frame.read(head, body)
    except BadFrame:
        return
    assert frame.pack(body) == head and body <= frames.MOST_BODY_BYTES


@given(
    kind=st.sampled_from([frames.HELLO, frames.PROBE, frames.READY]),
    sender=st.integers(0, 2**16 - 1),
    lane=st.integers(0, 2**64 - 1),
    tag=st.integers(-(2**63), 2**63 - 1),
    number=st.integers(0, 2**32 - 1),
)
def test_heads_come_back(kind: int, sender: int, lane: int, tag: int, number: int) -> None:
    frame = Frame(kind, sender, Key(lane, tag, number))
    assert Frame.read(frame.pack(10), 10) == frame
    body = bytes(10)
    assert Frame.split(memoryview(frame.pack(10) + body)) == (frame, memoryview(body))
    for changed in (frame.pack(11), b"\1" + frame.pack(10)[1:], frame.pack(10)[:-1]):
        with pytest.raises(BadFrame):
            Frame.read(changed, 10)


@given(
    st.lists(st.builds(Ack, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.booleans()))
)
def test_acknowledgements_come_back(acks: list[Ack]) -> None:
    body = frames.pack_acks(acks)
    assert read_acks(body) == acks
    with pytest.raises(BadFrame):
        read_acks(body + b"x")
