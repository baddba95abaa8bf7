"""A wait for a transfer's thread ends, whatever the thread does."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from dsx.core import fifo as fifo_module
from dsx.core.fifo import Fifo
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for


def test_results_and_errors_come_in_order() -> None:
    fifo, done = Fifo("test"), []
    futures: list[Future[Any]] = [Future() for _ in range(3)]

    def fail() -> None:
        raise TimeoutError("the task's own")

    fifo.submit(futures[0], lambda: done.append(1))
    fifo.submit(futures[1], fail)
    fifo.submit(futures[2], lambda: done.append(2))
    fifo.result(futures[2], "the third", 5.0)
    assert done == [1, 2]
    with pytest.raises(TimeoutError, match="the task's own"):
        fifo.result(futures[1], "the second", 5.0)
    fifo.end_soon()
    assert fifo.join(5.0)


def test_what_ends_a_thread_ends_the_wait() -> None:
    fifo = Fifo("test")
    future: Future[Any] = Future()

    def leave() -> None:
        raise SystemExit(3)  # no Exception

    fifo.submit(future, leave)
    with pytest.raises(SystemExit):
        fifo.result(future, "fragment 0", 5.0)


def test_a_thread_without_a_sign_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fifo_module, "SLACK_SECONDS", 0.2)
    fifo, go_on = Fifo("dsx-fragment-3"), threading.Event()
    future: Future[Any] = Future()

    def hang() -> None:
        with waiting_for("the copy of fragment 3 to the host", None):
            go_on.wait(20)

    fifo.submit(future, hang)
    began = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        fifo.result(future, "fragment 3 launched at step 40", 0.1)
    assert 0.3 <= time.monotonic() - began < 5
    assert "fragment 3 launched at step 40: the thread dsx-fragment-3 has given no sign" in str(
        lost.value
    )
    assert "it waits for the copy of fragment 3 to the host" in str(lost.value)
    assert not fifo.join(0.0)
    go_on.set()


def test_one_that_gives_signs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fifo_module, "SLACK_SECONDS", 0.1)
    fifo = Fifo("test")
    future: Future[Any] = Future()

    def take_rounds() -> str:
        for _ in range(10):
            time.sleep(0.1)
            fifo.give_sign()
        return "there"

    fifo.submit(future, take_rounds)
    assert fifo.result(future, "fragment 0", 0.2) == "there"
