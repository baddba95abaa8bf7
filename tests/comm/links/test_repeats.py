"""What the log says again and again goes out now and then; what is new goes out at once."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.comm.links.clerk import Clerk
from dsx.comm.links.repeats import Repeats
from dsx.comm.membership.entries import Ballot, Said
from dsx.comm.membership.messages import Append, Message, Prepare, Status, encode

BALLOT = Ballot(1, 0, 5)
STATUS = Status(1, BALLOT, 2, 2, 1, (0, 1), (), (), 0, 0, 0, 1.0, False, False)
EMPTY = Append(BALLOT, 2, (), 2, 2)


def test_signs_of_life_are_seconds_apart_and_news_are_not() -> None:
    now = [0.0]
    repeats = Repeats(4.0, lambda: now[0])
    sent = 0
    for tick in range(100):  # 10 s
        now[0] = tick / 10
        sent += repeats.is_due(1, replace(STATUS, sequence=tick))
        sent += repeats.is_due(1, EMPTY)
    assert sent == 2 * 3
    assert repeats.is_due(1, replace(STATUS, index=3))
    assert repeats.is_due(1, STATUS)  # as before, and other than the last
    assert not repeats.is_due(1, replace(STATUS, sequence=7))
    assert repeats.is_due(2, STATUS)
    repeats.forget(1)
    assert repeats.is_due(1, STATUS) and not repeats.is_due(2, STATUS)


def test_whatever_else_is_said_goes_out_each_time() -> None:
    repeats = Repeats(4.0, lambda: 0.0)
    said = Append(BALLOT, 2, (Said("a", "b", 0, 0),), 2, 2)
    for message in (said, Prepare(BALLOT, 2)):
        assert repeats.is_due(1, message) and repeats.is_due(1, message)


def test_the_first_word_of_a_peer_is_taken_before_anybody_has_looked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not said again soon. And whoever leads is answered, also with what was said before."""
    monkeypatch.setattr(Clerk, "_run", lambda self: None)
    sent: list[bytes] = []
    link: Any = SimpleNamespace(
        cluster_id=1, serve=lambda *_: None, why_gone=lambda name: "",
        process_at=lambda name: 70 + name[0], ask=lambda name, body: sent.append(body),
        readmit=lambda: None, hold=lambda ids, epoch: None, has_let_go=lambda name: False,
        is_apart=lambda name: False, incarnation=71,
    )  # fmt: skip
    clerk: Any = Clerk(link, {0: 70, 1: 71}, None, 30.0, lambda told: None)

    def hear(message: Message) -> None:
        clerk._receive((0, 0), b"L" + encode(message), lambda body: None)
        clerk._take_messages(time.monotonic() + 0.05)

    alive = Append(Ballot(1, 0, 70), 1, (), 1, 1)
    for _ in range(3):
        sent.clear()
        hear(alive)
        assert clerk._log.links == {0: 70}
        assert any(b'"Status"' in body for body in sent)
    clerk._log.tick()
    sent.clear()
    clerk._act()
    assert not sent  # nothing is new
