"""What is sent comes back equal; what does not fit is refused by name, and nothing of it taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.comm.membership import bounds
from dsx.comm.membership.bounds import COUNT, INTEGER, MESSAGE_BYTES
from dsx.comm.membership.codec import MessageRefused
from dsx.comm.membership.entries import Ballot, Commit, Contributor, End, Said, View, encoded
from dsx.comm.membership.messages import (
    Append,
    AskForLogs,
    Install,
    Message,
    Refusal,
    Report,
    Status,
    decode,
    encode,
)
from dsx.comm.membership.state import Remembered, State
from tests.comm.membership.forms import messages

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)
KINDS = sorted(kind.__name__ for kind in Message.__args__)  # type: ignore[attr-defined]


def is_refused_or_whole(data: bytes) -> None:
    try:
        message = decode(data)
    except MessageRefused:
        return
    assert decode(encode(message)) == message


@given(messages)
def test_a_message_comes_back_equal(message: Any) -> None:
    assert decode(encode(message)) == message


@settings(max_examples=150)
@given(st.binary(max_size=200))
def test_bytes_at_random_are_refused(data: bytes) -> None:
    is_refused_or_whole(data)


@settings(max_examples=150)
@given(st.sampled_from(KINDS), json_values)
def test_json_at_random_is_refused_or_a_whole_message(kind: str, fields: Any) -> None:
    is_refused_or_whole(json.dumps([1, kind, fields]).encode())


@settings(max_examples=150)
@given(messages, st.data())
def test_a_damaged_message_is_refused_or_another_whole_one(message: Any, data: Any) -> None:
    sent = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    is_refused_or_whole(bytes(sent[: data.draw(st.integers(0, len(sent)))]))
    is_refused_or_whole(bytes(sent))


ASK, COMMIT = '[1,"AskForLogs",[7]]', '["Commit",["a",0,1,"d"]]'


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is not JSON in UTF-8"),
        (b"\xff\xfe", "is not JSON in UTF-8"),
        (ASK.encode("utf-16"), "is not JSON in UTF-8"),
        (b"[" * 100_000, "is not JSON in UTF-8"),
        (b"7", "is not a list that begins with a version"),
        (b'[2,"AskForLogs",[7]]', "has version 2, not 1: run the same dsx"),
        (b'[true,"AskForLogs",[7]]', "has version True, not 1"),
        (b'[1,"AskForLog",[7]]', "is of kind 'AskForLog', not one of Status, Append"),
        (b'[1,"AskForLogs",[7],0]', "message has 3 parts, not 2"),
        (b'[1,"AskForLogs",[]]', "AskForLogs has 0 parts, not 1"),
        (b'[1,"AskForLogs",[7,8]]', "AskForLogs has 2 parts, not 1"),
        (b'[1,"AskForLogs",{"question":7}]', "AskForLogs is {'question': 7}, not a list"),
        (b'[1,"AskForLogs",[-1]]', "AskForLogs.question is -1, not an integer from 0"),
        (b'[1,"AskForLogs",[true]]', "AskForLogs.question is True, not an integer"),
        (b'[1,"AskForLogs",[7.0]]', "AskForLogs.question is 7.0, not an integer"),
        (b'[1,"AskForLogs",[NaN]]', "holds NaN, which is no finite number"),
        (b'[1,"AskForLogs",[4611686018427387905]]', "not an integer from 0 to 4611686018427387904"),
        (b'[1,"AskForLogs",[' + b"9" * 5000 + b"]]", ""),
        (f'[1,"Append",[[1,0,1,0],0,[{COMMIT.replace("d", "d" * 65)}],0,0]]'.encode(),
         "Commit.digest is 'd"),
        (b'[1,"Append",[[1,0,1,0],0,[["Commit",["\\ud800",0,1,"d"]]],0,0]]',
         "not a text in Unicode"),
        (b'[1,"Append",[[1,0,1,0],0,[["View",[1,[],[],false]]],0,0]]', "has no contributors"),
        (b'[1,"Append",[[1,0,1,0],0,[["View",[1,[[1,1,1.0],[0,1,1.0]],[],false]]],0,0]]',
         "ascending"),
        (b'[1,"Append",[[1,0,1,0],0,[["View",[1,[[1,1,1e999]],[],false]]],0,0]]', "finite and > 0"),
        (b'[1,"Append",[[1,0,1,0],0,[["View",[1,[[1,0,1.0]],[],false]]],0,0]]', "incarnation=0"),
        (b'[1,"Append",[[1,0,1,0],0,[["Said",["k","v",0,9999999]]],0,0]]', "lasts=9999999"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(data: bytes, why: str) -> None:
    with pytest.raises(MessageRefused) as refused:
        decode(data)
    assert why in str(refused.value)


def test_a_message_that_is_too_large_is_not_even_read() -> None:
    with pytest.raises(MessageRefused, match=f"bytes, of {MESSAGE_BYTES} at most"):
        decode(b" " * MESSAGE_BYTES + ASK.encode())
    assert decode(ASK.encode()) == AskForLogs(7)


def test_what_a_sender_may_not_send_is_refused_there() -> None:
    for message in (
        AskForLogs(-1),
        AskForLogs(2 * INTEGER + 1),
        Append(Ballot(1, 0, 1), 0, (Said("k" * 201, "", 0),), 0, 0),
        Append(Ballot(1, 0, 1), 0, (End(1),) * (COUNT + 1), 0, 0),
    ):
        with pytest.raises(MessageRefused):
            encode(message)


def test_the_largest_log_fits_a_message() -> None:
    worst = "\0"  # six bytes in JSON
    lane = [f"{i:04}" + worst * 96 for i in range(bounds.LANES)]
    view = View(1, tuple(Contributor(i, INTEGER, 1 / 3) for i in range(bounds.CLUSTERS)))
    state = State(
        INTEGER, INTEGER, view.contributors, (), dict.fromkeys(lane, INTEGER),
        {str(i): Remembered("v" * 2000, 1) for i in range(bounds.SAID_BYTES // 2000)},
    )  # fmt: skip
    smallest = min((End(1), Commit("", 0, 0, ""), Said("", "", 0)), key=lambda e: len(encoded(e)))
    num_entries = (bounds.KEPT_BYTES + bounds.PENDING_BYTES) // len(encoded(smallest))
    assert num_entries < COUNT
    tail = (Said("k", "v" * 2000, 1),) * (
        (bounds.KEPT_BYTES + bounds.PENDING_BYTES) // 2000
    ) + (view, view)  # fmt: skip
    install = Install(Ballot(INTEGER, INTEGER, INTEGER), INTEGER, state, tail)
    assert decode(encode(install)) == install
    reports = tuple(Report(name, INTEGER, worst * 64) for name in lane)
    status = Status(
        INTEGER, Ballot(), INTEGER, INTEGER, INTEGER, tuple(range(bounds.CLUSTERS)), reports, (),
        0, 0, 0, 1.0, False, False,
    )  # fmt: skip
    assert decode(encode(status)) == status


def test_the_ballot_of_a_refusal_keeps_its_order() -> None:
    assert decode(encode(Refusal(Ballot(2, 0, 5)))).promised > Ballot(1, 9, 9)
