"""Signals are noted, whatever the main thread does, and other handlers are left in place."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsx.training import grace
from dsx.training.grace import Grace
from dsx.training.signals import Signals

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (USR1, USR2)}
    wakeup = signal.set_wakeup_fd(-1)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(wakeup)


def test_a_signal_is_heard_on_another_thread() -> None:
    signals, heard = Signals(["SIGUSR1"]), threading.Event()

    def listen() -> tuple[int, int]:
        signals.wait(10)
        heard.set()
        return signals.count()

    with ThreadPoolExecutor(1) as threads:
        count = threads.submit(listen)
        signal.pthread_kill(threading.main_thread().ident or 0, USR1)
        assert heard.wait(10)
        assert count.result() == (1, USR1)
    os.kill(os.getpid(), USR1)
    signals.wait(1)
    assert signals.count() == (2, USR1)
    signals.close()


def test_a_handler_of_before_is_called_and_comes_back() -> None:
    called: list[int] = []

    def own(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(USR1, own)
    signals = Signals(["SIGUSR1", "SIGUSR2"])
    os.kill(os.getpid(), USR1)
    assert called == [USR1] and signals.count() == (1, USR1)
    signals.close()
    assert signal.getsignal(USR1) is own
    assert signal.getsignal(USR2) is signal.SIG_DFL


def test_a_handler_that_is_set_later_has_the_signal_alone() -> None:
    signals, called = Signals(["SIGUSR1"]), list[int]()

    def own(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(USR1, own)
    os.kill(os.getpid(), USR1)
    signals.wait(1)
    assert called == [USR1] and signals.count() == (0, 0)
    signals.close()
    assert signal.getsignal(USR1) is own


def test_two_handles_hear_the_same_signal() -> None:
    first, second = Signals(["SIGUSR1"]), Signals(["SIGUSR1"])
    os.kill(os.getpid(), USR1)
    for signals in (second, first):
        signals.wait(1)
    assert first.count()[0] == second.count()[0] == 1
    second.close()
    first.close()
    assert signal.getsignal(USR1) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_what_cannot_be_handled_is_named(caplog: pytest.LogCaptureFixture) -> None:
    signal.signal(USR1, signal.SIG_IGN)
    Signals(["SIGUSR1"]).close()
    assert signal.getsignal(USR1) is signal.SIG_IGN
    assert "SIGUSR1 is ignored by this process, and stays so" in caplog.text
    with ThreadPoolExecutor(1, thread_name_prefix="of_the_script") as threads:
        signals = threads.submit(Signals, ["SIGUSR2"]).result()
    assert "SIGUSR2 cannot be handled: this handle is made on thread 'of_the_script" in caplog.text
    signals.close()


def test_a_save_that_takes_longer_than_the_grace_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = [0.0]
    monkeypatch.setattr(grace.time, "perf_counter", lambda: now[0])
    times = Grace(30.0, speaks=True)
    for _ in range(7):
        now[0] += 20.0
        times.pass_boundary()
    assert not caplog.records  # a step alone fits
    times.saved(8.0)
    assert not caplog.records
    times.saved(12.0)
    times.saved(12.0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "a step (20.0 s) and a save (the last one took 12.0 s) takes longer than" in caplog.text
    assert "clusters.grace_seconds=30" in caplog.text
    Grace(1.0, speaks=True).estimate(1 << 20, tmp_path / "not" / "yet")  # too little to look
    assert not list(tmp_path.iterdir())


def test_an_estimate_writes_beside_the_checkpoints_and_leaves_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grace, "_PROBED_BYTES", 1 << 20)
    times = Grace(0.001, speaks=True)
    for _ in range(6):
        times.pass_boundary()
    caplog.clear()
    times._is_told = False
    times.estimate(1 << 40, tmp_path / "checkpoints")
    assert "estimated from 1099.5 GB and what" in caplog.text
    assert not list(tmp_path.iterdir())


def test_signals_are_heard_where_a_thousand_files_are_open() -> None:
    """As on the first rank of many, which serves them: `select` takes none above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this user may have {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1024:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        signals = Signals([])
        signals.wake()
        signals.wait(20.0)
        signals.close()
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
