"""What callers say first: whatever it is, it is understood or refused, with no more read."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsx.comm.links.entrance import Limits
from dsx.comm.links.gateway_process import GatewayProcess
from dsx.comm.links.gateway_table import read_line
from dsx.comm.links.greetings import (
    BadGreeting,
    Greeting,
    Message,
    ToName,
    ToSlot,
    Wanted,
    greet_relay,
    greet_zmtp_or_socks,
    member_in,
    pack_message,
    rank_name,
    routing_id,
)
from tests.comm.links.callers import Called, Calling, ask, eventually, socks

NAME = rank_name("site-a", 3)


def talk(greeting: Greeting, said: bytes) -> tuple[Wanted | None, bytes, int]:
    """Feed a greeting; return what is wanted (None if more has to come), heard, and read."""
    heard, at = b"", 0
    wanted = next(greeting)
    while True:
        try:
            if isinstance(wanted, bytes):
                heard += wanted
                wanted = greeting.send(b"")
            else:
                assert wanted > 0
                if at + wanted > len(said):
                    return None, heard, at
                at += wanted
                wanted = greeting.send(said[at - wanted : at])
        except StopIteration as end:
            return end.value, heard, at


# as they begin, so that what is drawn gets beyond the first byte
beginnings = st.sampled_from(
    [b"", b"\5", b"\5\1\0", b"\5\1\0\5\1\0\3", b"\xff", b"\xff" + bytes(7), b"DSXR", b"DSXRR\0"]
)


@settings(max_examples=400)
@given(beginnings, st.binary(max_size=400))
def test_any_bytes_are_understood_refused_or_waited_for(first: bytes, rest: bytes) -> None:
    said = first + rest
    for greet in (greet_zmtp_or_socks, greet_relay):
        try:
            wanted, _, num_read = talk(greet(), said)
        except BadGreeting as error:
            assert str(error) and len(error.answer) in (0, 2, 10)
            continue
        assert num_read <= len(said)
        if isinstance(wanted, ToName):
            assert wanted.name.isascii() and said[0] == 5
        elif isinstance(wanted, ToSlot):
            assert 0 <= wanted.slot < 240 and wanted.first == said[:10]
        elif isinstance(wanted, Message):
            assert said.startswith(b"DSXR") and greet is greet_relay


@given(st.integers(0, 238), st.binary(max_size=50))
def test_a_slot_is_told_by_libzmqs_signature_and_no_more_is_read(slot: int, rest: bytes) -> None:
    size = len(routing_id(slot)) + 1
    said = b"\xff" + size.to_bytes(8, "big") + b"\x7f"
    assert talk(greet_zmtp_or_socks(), said + rest) == (ToSlot(slot, said), b"", 10)


@given(st.integers(0, 9999), st.text("abcxyzABC019_-", min_size=1, max_size=32))
def test_a_name_is_told_by_socks5(rank: int, member: str) -> None:
    if member[0] in "_-":
        assert member_in(rank_name(member, rank)) is None
        return
    name = rank_name(member, rank)
    for greet in (greet_zmtp_or_socks, greet_relay):
        said = b"".join(socks(name))
        assert talk(greet(), said + b"rest") == (ToName(name), b"\5\0", len(said))
    assert member_in(name) == member


@pytest.mark.parametrize(
    "name",
    [
        "rank-01.a.dsx",
        "rank-.a.dsx",
        "rank-1.a.b.dsx",
        "rank-1..dsx",
        "rank-1.a.dsx\n",
        "RANK-1.a.dsx",
    ],
)
def test_a_name_has_one_spelling(name: str) -> None:
    assert member_in(name) is None


def test_bad_slots_and_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="slot=239 must be 0 to 238"):
        routing_id(239)
    with pytest.raises(ValueError, match="at most 32768"):
        pack_message(b"R", names="a" * 40_000)
    message = Message(b"R", json.dumps({"names": [1], "member": True}).encode())
    with pytest.raises(BadGreeting, match="without member"):
        message.field("member", str)
    deep = Message(b"R", b"[" * 30_000)
    with pytest.raises(BadGreeting, match="no JSON"):
        deep.field("member", str)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70_000) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["number", "ranks", "ways", "relays", "slot", "host", "port", "a"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.binary(max_size=60) | json_values.map(lambda v: json.dumps(v).encode()))
def test_a_line_is_taken_or_refused_in_words(line: bytes) -> None:
    try:
        told = read_line(line)
    except ValueError as error:
        assert str(error)
    else:
        assert isinstance(json.loads(line), dict) and told.number >= 0


@pytest.mark.ci
def test_bytes_of_any_kind_close_their_own_connection_and_are_counted() -> None:
    gateway = GatewayProcess("127.0.0.1", 0, Limits(greeting_seconds=0.3))
    port = gateway.start()
    with Called() as zero:
        gateway.update({NAME: (0, "127.0.0.1", zero.port)})
        with Calling(zero, port, routing_id(0)) as caller:
            assert caller.echoes()

            @settings(
                max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
            )
            @given(beginnings, st.binary(min_size=1, max_size=2000))
            def say(first: bytes, rest: bytes) -> None:
                heard = ask(port, first + rest, b"", reads=1)
                assert heard in (b"", b"\5", b"\xff")

            say()
            assert caller.echoes()
        counts = gateway.counts()
        assert sum(counts["refused"].values()) > 6_600
        assert eventually(lambda: gateway.counts()["greeting"] == 0)
    gateway.stop()
