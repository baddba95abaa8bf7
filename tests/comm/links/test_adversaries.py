"""What strangers and members can send to a port, and what it prints: messages go on, as they were.

Who has no key, a wrong or a revoked one, or speaks as another: test_link.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import resource
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import pytest
import torch
import zmq
from zmq.utils import z85

from dsx.comm.links import switch
from dsx.comm.links.frames import ACKS, ANSWER, ASK, CLOSED, DATA, HELLO, PROBE, READY, Frame, Key
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.store import LinkStore, Shelf
from tests.comm.links.clusters import SOON, KnownKeys, Line, check, groups_of, pairs_of, swap

MB = 1 << 20
Pairs = dict[int, tuple[bytes, bytes]]
KINDS = [HELLO, DATA, ACKS, READY, PROBE, ASK, ANSWER, 8, CLOSED]
NESTED = b"[" * 100_000


class Site:
    """Clusters 0 and 1, joined; 2 is a member that a test speaks for."""

    def __init__(self) -> None:
        self.pairs: Pairs = pairs_of(3)
        self.keys = [KnownKeys(m, self.pairs) for m in range(2)]
        self.links = [Link(m, 0, self.keys[m], LinkOptions()) for m in range(2)]
        self.line = Line(self.links[0].port)
        self.links[0].serve(Shelf().serve)
        self.links[0].expect(1, 0, None)
        self.links[1].expect(0, 0, self.line.address)
        for m in range(2):
            self.links[m].wait_for(1 - m, 0, 20)
        self.groups = groups_of(self.links)

    @contextlib.contextmanager
    def member(self, rank: int = 0) -> Generator[Any]:
        """Yield a socket of cluster 2, whose rank has greeted cluster 0."""
        context = zmq.Context()
        own = context.socket(zmq.DEALER)
        own.curve_serverkey = self.pairs[0][0]
        own.curve_publickey, own.curve_secretkey = self.pairs[2]
        own.sndhwm = own.rcvhwm = 0
        own.connect(f"tcp://127.0.0.1:{self.links[0].port}")
        own.send_multipart(frame(HELLO, hello(rank=rank)))
        try:
            assert own.poll(10_000), "the greeting was answered"
            yield own
        finally:
            context.destroy(200)

    @property
    def dropped(self) -> int:
        return sum(self.links[0].problems.values())


def hello(**other: Any) -> bytes:
    values = {"rank": 0, "connection": 0, "number": 1, "incarnation": 5, **other}
    return json.dumps(values).encode()


def frame(kind: int, body: bytes = b"", **fields: Any) -> list[bytes]:
    return [Frame(kind, 2, **fields).pack(len(body)), body]


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    for link in site.links:
        link.close()
    site.line.close()


def test_what_a_member_says_that_cannot_be_ends_nothing(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    chunk = 1 << 19
    key, lane = Key(9, 0, 0), site.groups[0].lane
    wrong = [
        frame(HELLO, NESTED),
        frame(HELLO, b'{"rank": 1e999, "connection": 0, "number": 1, "incarnation": 5}'),
        frame(HELLO, hello(number=10**400)),
        frame(HELLO, hello(connection=70)),
        frame(HELLO, hello(rank=-1)),
        frame(HELLO, b"3"),
        frame(DATA, b"x", start=chunk << 40, total=(chunk << 40) + 1),
        frame(DATA, b"xy", key=key, start=chunk, total=chunk + 2),
        frame(DATA, b"x" * 1000, key=key, start=chunk, total=chunk + 1000),
        frame(DATA, b"x" * 10, key=key, total=10),
        frame(DATA, b"x" * 10, key=key, start=1, total=20),
        frame(ACKS, b"x" * 14),
        frame(ANSWER, b"not an answer", serial=1),
        frame(READY, key=Key(lane, 0, 10**6)),
        frame(CLOSED, key=Key(lane, 0, 0)),
        *[frame(PROBE, total=n) for n in (1, 2**64 - 1)],
    ]
    requests = [
        b'["1", "get"]', b'["2", "set", "x"]', b'["3", "wait", 5, "x"]', b'[[], "get", "x"]',
        b'["4", "wait", ["x"], 1e999]', b'["5", "add", "x", 1e999]', b'["6", "check", [[]]]',
        b"5", b"{}", b"", b"\xff", NESTED,
    ]  # fmt: skip
    wrong += [frame(ASK, body, serial=n) for n, body in enumerate(requests)]
    with site.member() as own:
        for parts in wrong:
            own.send_multipart(parts)
        until = time.monotonic() + 20
        answers: list[bytes] = []
        while time.monotonic() < until and len(answers) < len(requests) - 1:
            if own.poll(200):
                frame_of_it, body = Frame.split(memoryview(own.recv()))
                answers += [bytes(body)] if frame_of_it.kind == ANSWER else []
    assert sum(b"cannot be done" in answer for answer in answers) == len(requests) - 1
    check(swap(site.groups, 3 * MB))
    store = LinkStore(site.links[1], (0, 0))
    store.set("x", "still here")
    assert store.get("x") == b"still here"
    with capsys.disabled():
        print("\n", dict(site.links[0].problems))


def test_a_member_makes_no_more_peers_than_a_cluster_has_ranks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "_MOST_UNEXPECTED", 20)
    inner: Any = site.links[0].__dict__["_switch"]
    with site.member() as own:
        for rank in range(1, 500):
            own.send_multipart(frame(HELLO, hello(rank=rank)))
        until = time.monotonic() + 10
        while site.dropped < 480 and time.monotonic() < until:
            time.sleep(0.02)
        assert site.links[0].problems == {"a greeting of one more than 20 ranks": 499 - 19}
        assert sum(cluster == 2 for cluster, _ in inner.peers) == 20
    check(swap(site.groups, MB))


def test_a_message_of_two_lengths_is_not_put_together(site: Site) -> None:
    chunk, place = 1 << 19, torch.zeros((1 << 19) + 2, dtype=torch.uint8)
    lane = site.groups[0].lane
    with site.member() as own:
        own.send_multipart(frame(HELLO, hello(connection=1)))
        own.send_multipart(frame(DATA, b"xy", key=Key(lane, 5, 0), start=chunk, total=chunk + 2))
        own.send_multipart(
            frame(DATA, b"x" * chunk, key=Key(lane, 5, 0), total=2 * chunk, serial=0)
        )
        until = time.monotonic() + 10
        while not site.links[0].problems and time.monotonic() < until:
            time.sleep(0.02)
        assert site.links[0].problems == {"a message that is also said to be another": 1}
        bytes_of_it: Any = place.numpy()
        site.links[0].receive((2, 0), lane, 5, memoryview(bytes_of_it))
        time.sleep(0.2)
    check(swap(site.groups, MB))


def test_an_answer_counts_from_whom_was_asked(site: Site) -> None:
    asked = site.links[0].ask((1, 0), b'["1", "get", "x"]')  # where nobody serves
    with site.member() as own:
        for serial in range(50):
            own.send_multipart(frame(ANSWER, b'{"value": "forged"}', serial=serial))
        time.sleep(0.5)
        assert not asked.done()
    site.links[1].serve(Shelf().serve)
    assert asked.result(10) == b'{"value": null}'


def fuzzed(source: random.Random, count: int) -> Iterator[list[bytes]]:
    """Yield messages of a member that are rubbish, or nearly frames."""
    for number in range(count):
        body = source.randbytes(source.choice([0, 1, 13, 100, 5000]))
        good = Frame(
            source.choice(KINDS), source.choice([0, 1, 2, 2, 2]),
            Key(source.getrandbits(64), source.getrandbits(63), source.getrandbits(32)),
            serial=source.getrandbits(64),
            start=source.choice([0, 1 << 19, source.getrandbits(63)]),
            total=source.choice([len(body), source.getrandbits(64)]),
        ).pack(len(body))  # fmt: skip
        flipped = bytearray(good)
        flipped[source.randrange(len(good))] ^= 1 << source.randrange(8)
        yield [
            [good, body],
            [bytes(flipped), body],
            [source.randbytes(56), body],
            [body],
            [good, body, body],
        ][number % 5]


@pytest.mark.ci
def test_ten_thousand_frames_of_a_member_end_nothing(
    site: Site, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    source = random.Random(0)
    check(swap(site.groups, MB))
    with site.member() as own:
        for number, parts in enumerate(fuzzed(source, 10_000)):
            own.send_multipart(parts)
            if number % 1000 == 0:
                check(swap(site.groups, MB))
        until = time.monotonic() + 60
        while site.dropped < 7000 and time.monotonic() < until:
            time.sleep(0.1)
    check(swap(site.groups, 5 * MB))
    problems = site.links[0].problems
    assert site.dropped >= 7000 and len(problems) <= 70 and len(caplog.records) < 500
    with site.member(rank=1) as own, contextlib.suppress(zmq.ZMQError):
        own.send_multipart(frame(DATA, b"x" * (5 << 20), total=5 << 20))  # libzmq hangs up
    check(swap(site.groups, MB))
    with capsys.disabled():
        print(f"\ndropped {site.dropped} in {len(problems)} kinds, {len(caplog.records)} lines;",
              problems.most_common(3))  # fmt: skip


def raw(source: random.Random) -> bytes:
    """Return what a stranger may say first: nothing of ZMTP, nearly it, or too much of it."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    null = greeting.replace(b"CURVE", b"NULL\0")
    long_command = b"\x06" + struct.pack(">Q", 1 << source.randrange(10, 63))
    ready = b"\x04\x19\x05READY" + b"\x0bSocket-Type" + b"\0\0\0\6DEALER"
    return source.choice([
        source.randbytes(source.randrange(1, 300)),
        greeting[: source.randrange(1, 64)],
        greeting + source.randbytes(source.randrange(1, 300)),
        greeting + b"\x04\xc8\x05HELLO\x01\x00" + source.randbytes(192),
        greeting + long_command + bytes(100),
        null + ready + b"\x01\x38" + source.randbytes(56),
        b"GET / HTTP/1.1\r\n\r\n",
    ])  # fmt: skip


@pytest.mark.ci
def test_ten_thousand_strangers_that_say_rubbish(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    source, port = random.Random(1), site.links[0].port
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    num_cut = 0
    for number in range(10_000):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as one:
            one.sendall(raw(source))
            if number % 100 == 0:
                one.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    num_cut += not one.recv(1000)
        if number % 1000 == 0:
            check(swap(site.groups, MB))
    check(swap(site.groups, 20 * MB))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 400
    assert not any("ended" in problem for problem in site.links[0].problems)
    with capsys.disabled():
        print(f"\n10000 in {time.monotonic() - started:.1f} s, {grown:.0f} MB more at most, "
              f"dropped {dict(site.links[0].problems)}")  # fmt: skip


def test_what_was_recorded_and_is_played_back_opens_nothing(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every connection's bytes of the one who called, whole, and in pieces with those it got."""
    check(swap(site.groups, 2 * MB))
    time.sleep(0.3)
    recorded = [bytes(said) for said in site.line.said]
    assert len(recorded) >= 2 and max(map(len, recorded)) > 2 * MB
    before = site.dropped
    for said in recorded:
        for end in (len(said), 64 + 202, 1000):
            with socket.create_connection(("127.0.0.1", site.links[0].port), 5) as one:
                with contextlib.suppress(OSError):
                    one.sendall(said[:end])
                one.settimeout(0.5)
                heard = b""
                with contextlib.suppress(OSError):
                    while more := one.recv(1000):
                        heard += more
                assert len(heard) < 1000, "no more than a greeting and a welcome"
    assert site.dropped == before, "nothing was taken for a frame"
    host: Any = site.links[0]
    assert [*host._switch.peers] == [(1, 0)]
    check(swap(site.groups, MB))
    with capsys.disabled():
        print(
            f"\nplayed back {len(recorded)} connections, {sum(map(len, recorded))} bytes: no frame"
        )


def seconds_of(do: Callable[[], object]) -> float:
    started = time.monotonic()
    do()
    return time.monotonic() - started


@pytest.mark.ci
def test_silent_connections_hold_nobody_up(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    third, host = KnownKeys(2, site.pairs), cast("Any", site.links[0])

    def start() -> None:
        link = Link(2, 0, third, LinkOptions())
        link.expect(0, 0, f"127.0.0.1:{site.links[0].port}")
        link.wait_for(0, 0, 20)
        link.close()
        host._post(lambda: host._switch.peers.pop((2, 0)))

    def transfers() -> None:
        for _ in range(5):
            check(swap(site.groups, 10 * MB))

    site.links[0].expect(2, 0, None)
    calm = [seconds_of(start), min(seconds_of(transfers) for _ in range(3))]
    silent = [socket.create_connection(("127.0.0.1", site.links[0].port), 5) for _ in range(500)]
    try:
        crowded = [seconds_of(start), min(seconds_of(transfers) for _ in range(3))]
    finally:
        for one in silent:
            one.close()
    assert crowded[0] < calm[0] + 2
    assert crowded[1] < 4 * calm[1] + 5  # by the clock of a busy machine: what is printed says more
    with capsys.disabled():
        print(f"\nstart {calm[0]:.2f} s, with 500 silent {crowded[0]:.2f} s;",
              f"100 MB {calm[1]:.2f} s, {crowded[1]:.2f} s")  # fmt: skip


def test_no_weights_names_or_keys_are_in_a_capture(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = torch.randn(MB)
    text = b"the name of a run and of its berlin and oslo clusters"
    store = LinkStore(site.links[1], (0, 0))
    store.set(text.decode(), text.decode())
    place = torch.zeros(MB)
    arriving = site.groups[0].recv([place], 1, 0)
    site.groups[1].send([weights], 0, 0).wait(SOON)
    arriving.wait(SOON)
    assert torch.equal(place, weights)
    time.sleep(0.2)
    capture = bytes(site.line.passed)
    assert len(capture) > 4 * MB
    own = weights.numpy().tobytes()
    runs = [own[at : at + 8] for at in range(0, len(own), 4096)]
    named = [text[at : at + 8] for at in range(0, len(text) - 8, 8)]
    pairs = [key for pair in site.pairs.values() for key in pair]
    keys = [part for key in pairs for part in (key, z85.decode(key))]
    for secret in [*runs, *named, *keys, b"incarnation", b"compare_set"]:
        assert secret not in capture, secret
    with capsys.disabled():
        print(f"\n{len(capture)} bytes captured: none of {len(runs)} runs of weights, "
              f"{len(named)} of names, {len(keys)} keys")  # fmt: skip
