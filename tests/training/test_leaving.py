"""A cluster that is told to end: when it stops, what it hands over, and what comes of it."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.checkpoint.checksums import MANIFEST, read_manifest, sealed
from dsx.core.leaving import ORDERED, Reason
from dsx.core.transport import Pending
from dsx.training import leaving
from dsx.training.leaving import Leaving

TERM = Reason(2, signal.SIGTERM)


class Log:
    """The clerk of a cluster whose log says what a test has it say."""

    def __init__(self, hears: bool = True, may_leave: bool = True) -> None:
        self._hears, self._may_leave = hears, may_leave
        self.all_end: Reason | None = None
        self.departures = self
        self.said: list[Reason] = []
        self.leaves = threading.Event()
        self.has_left = threading.Event()

    def may_leave(self, alone: bool = False) -> bool:
        return self._may_leave

    def say_told_to_end(self, reason: Reason) -> None:
        self.said.append(reason)

    @property
    def has_said_told(self) -> bool:
        return self._hears and bool(self.said)

    def leave(self) -> None:
        self.leaves.set()


class UnderWay(Pending):
    """A transfer that is committed when a test says so."""

    def __init__(self) -> None:
        self.is_there = False

    def wait(self) -> Tensor:
        return torch.zeros(1)

    @property
    def has_arrived(self) -> bool:
        return self.is_there


def told(log: Any, seconds: float = 0.3) -> tuple[Leaving, Future[Reason]]:
    """Return what has a cluster leave, and the reason for which it stops."""
    stopped: Future[Reason] = Future()
    return Leaving(log, None, 1, seconds, stopped.set_result), stopped


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + 10
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_it_trains_on_hands_over_and_goes(tmp_path: Path) -> None:
    manifest = tmp_path / MANIFEST
    manifest.write_text(json.dumps(sealed({"step": 9, "is_preempted": True})))
    log, began = Log(), time.monotonic()
    leave, stopped = told(log)
    leave.ask(TERM)
    leave.ask(Reason(2, signal.SIGUSR1))  # the first one counts
    reason = stopped.result(10)
    assert time.monotonic() - began >= 0.3
    assert reason == Reason(2, signal.SIGTERM, leaves=True) and log.said == [TERM]
    assert reason.exit_code == 0 and "leaving the others" in reason.sentence
    transfer = UnderWay()
    leave.begin([transfer], time.monotonic() + 20)
    assert not log.leaves.wait(0.3)
    transfer.is_there = True
    assert log.leaves.wait(10)
    log.has_left.set()
    assert leave.end(reason, tmp_path, time.monotonic() + 10) == (
        reason, "the others go on without this cluster"
    )  # fmt: skip
    assert read_manifest(manifest) == {"step": 9, "is_preempted": True, "has_left": True}


def test_an_order_does_not_wait_and_is_refused_where_the_others_cannot_go_on() -> None:
    log = Log()
    leave, stopped = told(log, 100.0)
    assert leave.order(2, {}) == {"reason": "dsx ctl leave"}
    assert stopped.result(5) == Reason(2, ORDERED, leaves=True)
    assert stopped.result().for_all() == TERM
    refused, _ = told(Log(may_leave=False))
    with pytest.raises(ValueError, match=r"no majority .* dsx ctl stop has all save and end"):
        refused.order(2, {})
    refused.close()


def test_where_others_are_told_as_well_all_end() -> None:
    log = Log()
    leave, stopped = told(log, 100.0)
    leave.ask(TERM)
    wait_for(lambda: log.said)
    log.all_end = Reason(0)
    assert stopped.result(5) == Reason(0) and leave.all_end == Reason(0)


def test_also_after_it_has_stopped() -> None:
    log = Log()
    leave, stopped = told(log, 0.0)
    leave.ask(TERM)
    reason = stopped.result(5)
    leave.begin([UnderWay()], time.monotonic() + 20)
    log.all_end = Reason(0)
    end, why = leave.end(reason, None, time.monotonic() + 10)
    assert end == TERM and end.exit_code == 143 and "others are told to end meanwhile" in why


def test_what_the_log_does_not_hear_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "_LOG_SECONDS", 0.2)
    for log in (Log(hears=False), Log(may_leave=False)):
        leave, stopped = told(log, 0.0)
        leave.ask(TERM)
        assert stopped.result(5) == TERM
        leave.close()


def test_it_goes_in_time_whatever_is_under_way(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    leave, stopped = told(log, 0.0)
    leave.ask(TERM)
    reason, until = stopped.result(5), time.monotonic() + 1.0
    leave.begin([UnderWay()], until)
    end, why = leave.end(reason, None, until + 1.0)
    assert log.leaves.is_set() and end == reason
    assert "have not confirmed that the others go on without this cluster" in why
    assert "1 of 1 transfers under way are not committed in time" in caplog.text
