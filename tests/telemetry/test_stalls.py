"""A wait that has lasted half of its deadline is reported once, with stacks and all waits."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dsx.comm.gloo import GlooTransport
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.compress.averaging import ExactMean
from dsx.core.membership import Seat
from dsx.core.transport import Submission
from dsx.core.waits import Wait, waiting_for, waits_under_way
from dsx.telemetry import stalls
from dsx.telemetry.stalls import StallWatch, stacks_path


class Clock:
    """Seconds that pass when a test says so, ahead of time.monotonic()."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        import time

        return time.monotonic() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


def of_test(prefix: str) -> list[Wait]:
    return [wait for wait in waits_under_way() if wait.what.startswith(prefix)]


@pytest.fixture
def hung() -> Iterator[str]:
    """A thread that waits for something that never comes, with a deadline of 600 s."""
    what, leave, inside = "test hung: the mean of fragment 3", threading.Event(), threading.Event()

    def hang_in_a_transfer() -> None:
        with waiting_for(what, 600):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hang_in_a_transfer, name="dsx-fragment-3")
    thread.start()
    inside.wait(60)
    yield what
    leave.set()
    thread.join(60)


def watch_of(clock: Clock, prefix: str, folder: Path | None = None) -> StallWatch:
    watch = StallWatch(clock, lambda: of_test(prefix))
    if folder is not None:
        watch.write_to(folder, 1, 2)
    return watch


def test_at_half_of_a_deadline_and_once(
    tmp_path: Path, clock: Clock, hung: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watch_of(clock, hung, tmp_path / "run")
    file = stacks_path(tmp_path / "run", 1, 2)
    clock.ahead = 290
    watch.look()
    assert not file.parent.exists() and not caplog.messages
    clock.ahead = 301
    watch.look()
    watch.look()
    text = file.read_text()
    assert text.count("waited for, the longest first:") == 1
    assert f"dsx-fragment-3 has waited 301.0 s of 600 s for {hung}" in text
    assert f"thread {threading.current_thread().name}\n" not in text  # the one that looks
    stack = text.partition("thread dsx-fragment-3\n")[2].partition("\nthread ")[0]
    assert "in hang_in_a_transfer" in stack and "threading.py" in stack
    (line,) = caplog.messages
    assert line.startswith(f"has waited 301.0 s of 600 s for {hung}; ") and str(file) in line


def test_a_new_wait_is_reported_again_behind_the_first(tmp_path: Path, clock: Clock) -> None:
    watch = watch_of(clock, "test again", tmp_path)
    for seconds in (2, 4):
        with waiting_for(f"test again: {seconds}", seconds):
            clock.ahead += seconds / 2
            watch.look()
    text = stacks_path(tmp_path, 1, 2).read_text()
    assert text.index("for test again: 2") < text.index("for test again: 4")


def test_without_a_folder_the_log_has_it_shortened(
    clock: Clock, hung: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock.ahead = 301
    watch_of(clock, hung).look()
    (line,) = caplog.messages
    assert hung in line
    first = line.partition("threads:\n")[2].splitlines()
    assert first[0] == "thread dsx-fragment-3"  # who waits comes first
    assert any("in hang_in_a_transfer" in entry for entry in first[1:5])
    runs = "".join("." if entry.startswith("  ") else "|" for entry in first).split("|")
    assert max(map(len, runs)) == stalls._FEW_FRAMES


def test_a_full_disk_does_not_hurt(
    tmp_path: Path, clock: Clock, hung: str, caplog: pytest.LogCaptureFixture
) -> None:
    stacks_path(tmp_path, 1, 2).symlink_to("/dev/full")
    clock.ahead = 301
    watch_of(clock, hung, tmp_path).look()
    assert "cannot be written: No space left on device; threads:" in caplog.messages[-1]
    assert "in hang_in_a_transfer" in caplog.messages[-1]


def test_a_file_does_not_grow_without_limit(
    tmp_path: Path, clock: Clock, hung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "_MOST_BYTES", 100)
    file = stacks_path(tmp_path, 1, 2)
    file.write_text("of before\n" * 20)
    clock.ahead = 301
    watch_of(clock, hung, tmp_path).look()
    assert "of before" not in file.read_text() and hung in file.read_text()


def test_what_cannot_be_said_ends_no_report(tmp_path: Path, clock: Clock) -> None:
    def fail() -> str:
        raise KeyError("peer")

    with waiting_for(fail, 10) as wait:
        clock.ahead = 5
        watch = StallWatch(clock, lambda: [wait])
        watch.write_to(tmp_path, 0, 0)
        watch.look()
    assert "(cannot be said: KeyError('peer'))" in stacks_path(tmp_path, 0, 0).read_text()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="needs SIGUSR2")
def test_a_signal_asks_for_a_report(tmp_path: Path, clock: Clock, hung: str) -> None:
    watch = watch_of(clock, hung, tmp_path)
    watch.listen()
    try:
        watch.look()
        assert not list(tmp_path.iterdir())
        signal.raise_signal(signal.SIGUSR2)
        watch.look()
        watch.look()
    finally:
        faulthandler.unregister(signal.SIGUSR2)
    text = stacks_path(tmp_path, 1, 2).read_text()
    assert text.count("SIGUSR2 asks what this rank is doing") == 1
    assert hung in text and "in hang_in_a_transfer" in text


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="needs SIGUSR2")
@pytest.mark.parametrize("is_taken_before", [True, False])
def test_a_signal_that_is_taken_stays_with_its_owner(
    tmp_path: Path, clock: Clock, is_taken_before: bool
) -> None:
    """As where `clusters.preemption_signals` names it, which a handle takes after the watch."""
    told: list[int] = []

    def take() -> None:
        signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))

    watch = watch_of(clock, "test none", tmp_path)
    try:
        for step in (take, watch.listen) if is_taken_before else (watch.listen, take):
            step()
        signal.raise_signal(signal.SIGUSR2)
        watch.look()
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert told == [signal.SIGUSR2] and not list(tmp_path.iterdir())


def test_a_hung_peer_is_named_at_half_of_the_deadline(tmp_path: Path, clock: Clock) -> None:
    """Two clusters over gloo; one has launched, and the other does not come before the report."""
    store, device = dist.HashStore(), open_device("lo")
    made: dict[int, GlooTransport] = {}

    def open_cluster(cluster: int) -> None:
        seat = Seat.of(cluster, 2)

        def connect(what: str, streams: int) -> list[object]:
            named = dist.PrefixStore(what, store)
            return connect_gloo(named, seat, timedelta(seconds=20), device, streams)

        made[cluster] = GlooTransport([0], connect, seat, 60)

    opening = [threading.Thread(target=open_cluster, args=(cluster,)) for cluster in (0, 1)]
    for thread in opening:
        thread.start()
    for thread in opening:
        thread.join(60)
    what = Submission(0, 40)
    watch = watch_of(clock, "fragment 0", tmp_path)
    mean = ExactMean(made[0].seat).exchange(torch.ones(3))
    pending = made[0].submit(what, mean)
    training = threading.Thread(target=pending.wait, name="training")
    training.start()
    while len(of_test("fragment 0")) < 2:  # the fragment's thread and the one that trains
        assert training.is_alive()
    clock.ahead = 31
    watch.look()
    other = made[1].submit(what, ExactMean(made[1].seat).exchange(3 * torch.ones(3)))
    assert other.wait().tolist() == [2.0, 2.0, 2.0]
    training.join(60)
    for transport in made.values():
        transport.close()
    text = stacks_path(tmp_path, 1, 2).read_text()
    waits, _, threads = text.partition("\nthread ")
    assert "dsx-fragment-0 has waited" in waits and "training has waited" in waits
    assert "fragment 0 launched at step 40, cluster 1" in waits
    fragment = f"thread {threads}".partition("thread dsx-fragment-0\n")[2].partition("\nthread")[0]
    assert "point_to_point.py" in fragment
    assert "gloo.py" in f"thread {threads}".partition("thread training\n")[2]


def test_one_thread_per_process_looks_and_writes_to_the_file_of_a_run(tmp_path: Path) -> None:
    program = f"""
import os, signal, threading, time
from pathlib import Path
from dsx.core.waits import waiting_for
from dsx.telemetry.stalls import stacks_path, stall_watch
watch = stall_watch()
assert stall_watch() is watch
assert [t.name for t in threading.enumerate()].count("dsx-stalls") == 1
watch.write_to(Path({str(tmp_path)!r}), 0, 0)
file = stacks_path(Path({str(tmp_path)!r}), 0, 0)
lock = threading.Lock(); lock.acquire()
def wait():
    with waiting_for("a lock", 0.02):
        lock.acquire()
threading.Thread(target=wait, name="waiter").start()
while not file.exists() or not file.read_text().endswith("\\n\\n"): time.sleep(0.01)
lock.release()
watch.leave(Path({str(tmp_path)!r}), 0, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    text = stacks_path(tmp_path, 0, 0).read_text()
    assert "waiter has waited 0." in text and "of 0.02 s for a lock" in text
    assert "thread MainThread" in text
