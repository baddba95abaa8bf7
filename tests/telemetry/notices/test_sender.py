"""Notices on a thread: order, tries, the end of tries, what is held back, and an end that waits."""

from __future__ import annotations

import threading
import time

import pytest

from dsx.telemetry.notices.hooks import Hook, Undelivered, Webhook
from dsx.telemetry.notices.notice import KINDS, Notice
from dsx.telemetry.notices.sender import Sender
from tests.telemetry.notices.web import Web, notice


class Kept:
    """A place that refuses the first `refusals` tries."""

    name = "a place"

    def __init__(self, refusals: int = 0, may_retry: bool = True, waits: float = 0.0) -> None:
        self.left, self.may_retry, self.waits = refusals, may_retry, waits
        self.got: list[Notice] = []
        self.tries: list[float] = []

    def deliver(self, notice: Notice, seconds: float) -> None:
        self.tries.append(time.monotonic())
        if self.left:
            self.left -= 1
            raise Undelivered("it says no", self.may_retry, self.waits)
        self.got.append(notice)


def sender(
    hook: Hook, per_hour: int = 100, waits: tuple[float, ...] = (0.05, 0.1), window: float = 3600.0
) -> Sender:  # noqa: E501
    return Sender(hook, KINDS, per_hour, waits, window)


def end(one: Sender, seconds: float = 10.0) -> float:
    began = time.monotonic()
    one.close(began + seconds)
    return time.monotonic() - began


def test_who_tells_does_not_wait_and_all_arrive_in_order() -> None:
    with Web(seconds=0.1) as web:
        one = sender(Webhook(web.url, "json"))
        began = time.monotonic()
        for step in range(5):
            one.tell(notice(step=step))
        assert time.monotonic() - began < 0.1
        end(one)
    assert [document["step"] for document in web.documents] == [0, 1, 2, 3, 4]


def test_what_nobody_expected_ends_no_notices(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Kept):
        def deliver(self, notice: Notice, seconds: float) -> None:
            super().deliver(notice, seconds)
            if len(self.got) == 1:
                raise UnicodeError("label too long: https://h/SECRET")

    odd = Odd()
    one = sender(odd)
    for step in range(3):
        one.tell(notice(step=step))
    end(one)
    assert len(odd.got) == 3 and "UnicodeError in sending it" in caplog.text
    assert "SECRET" not in caplog.text


def test_places_are_waited_for_together(caplog: pytest.LogCaptureFixture) -> None:
    """One that hangs leaves the next one its time."""
    goes_on = threading.Event()

    class Hangs(Kept):
        def deliver(self, notice: Notice, seconds: float) -> None:
            goes_on.wait(20)

    kept = Kept()
    senders = [sender(Hangs()), sender(kept)]
    for one in senders:
        one.tell(notice())
    until = time.monotonic() + 0.5
    for one in senders:
        one.end(until)
    for one in senders:
        one.close(until)
    goes_on.set()
    assert len(kept.got) == 1 and caplog.text.count("have not arrived") == 1


def test_an_interpreter_that_starts_no_thread_sends_the_last_one_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    kept = Kept(refusals=1)
    one = sender(kept)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        one.tell(notice())
    end(one)
    assert len(kept.got) == 1


def test_only_kinds_that_a_place_wants() -> None:
    kept = Kept()
    one = Sender(kept, ("finished",), 10)
    one.tell(notice("lost"))
    one.tell(notice("finished"))
    end(one)
    assert [n.kind for n in kept.got] == ["finished"]


def test_a_server_that_fails_is_tried_again() -> None:
    with Web([500, 503, 200]) as web:
        one = sender(Webhook(web.url, "json"), waits=(0.1, 0.3))
        one.tell(notice())
        web.wait_for(3)
        end(one)
    first, second, third = web.times
    assert second - first >= 0.1 and third - second >= 0.3
    assert len({body for _, _, body in web.got}) == 1


def test_a_time_that_the_other_side_names_is_waited_for() -> None:
    kept = Kept(1, waits=0.4)
    one = sender(kept, waits=(0.01,))
    one.tell(notice())
    until = time.monotonic() + 10
    while not kept.got and time.monotonic() < until:
        time.sleep(0.01)
    assert kept.tries[1] - kept.tries[0] >= 0.4
    end(one)


def test_tries_have_an_end_which_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(6)
    one = sender(kept)
    for step in range(3):
        one.tell(notice(step=step))
    until = time.monotonic() + 10
    while not kept.got and time.monotonic() < until:
        time.sleep(0.01)
    end(one)
    assert len(kept.tries) == 7 and [n.step for n in kept.got] == [2]
    assert caplog.text.count("a notice to a place has not arrived: it says no (tries: 3") == 1
    assert caplog.text.count("of the notices to a place 2 have not arrived: it says no") == 1


def test_what_will_never_arrive_is_not_tried_again() -> None:
    kept = Kept(1, may_retry=False)
    one = sender(kept)
    one.tell(notice(step=1))
    one.tell(notice(step=2))
    end(one)
    assert len(kept.tries) == 2 and [n.step for n in kept.got] == [2]


def test_too_many_are_held_back_and_counted() -> None:
    kept = Kept()
    one = sender(kept, per_hour=2, window=1.0)
    for step, kind in enumerate(["lost", "back", "left_out", "left_out", "lost"]):
        one.tell(notice(kind, step=step))
    until = time.monotonic() + 10
    while len(kept.got) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert [(n.step, dict(n.held)) for n in kept.got] == [(0, {}), (1, {}), (4, {"left_out": 2})]
    assert kept.tries[2] - kept.tries[0] >= 0.95
    end(one)


def test_the_end_goes_beyond_the_limit_and_says_what_was_held_back() -> None:
    kept = Kept()
    one = sender(kept, per_hour=1)
    for kind in ("lost", "left_out", "left_out", "finished"):
        one.tell(notice(kind))
    end(one)
    assert [(n.kind, dict(n.held)) for n in kept.got] == [
        ("lost", {}), ("finished", {"left_out": 2}),
    ]  # fmt: skip
    held = sender(Kept(), per_hour=1)
    held.tell(notice("lost"))
    held.tell(notice("back"))
    end(held)
    assert [n.kind for n in held._hook.got] == ["lost", "back"]  # type: ignore[attr-defined]


def test_an_end_waits_for_a_place_that_fails_no_longer_than_it_may(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Web(seconds=30) as web:
        one = sender(Webhook(web.url, "json"))
        one.tell(notice())
        one.tell(notice("finished"))
        web.wait_for(1)
        assert end(one, 1.0) < 1.5
    assert "2 have not arrived: it has not answered in time" in caplog.text
    failing = sender(Kept(10**6), waits=(600.0,))
    failing.tell(notice())
    assert end(failing, 3.0) < 3.5
    assert len(failing._hook.tries) > 1  # type: ignore[attr-defined]


def test_nothing_is_started_where_nothing_is_told() -> None:
    before = threading.active_count()
    one = sender(Kept())
    assert threading.active_count() == before
    assert end(one) < 0.5
