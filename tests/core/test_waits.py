from __future__ import annotations

import threading
import time

import pytest

from dsx.core.waits import PATIENCE_SECONDS, NextWait, waiting_for, waits_under_way


def named(prefix: str) -> list[str]:
    return [wait.what for wait in waits_under_way() if wait.what.startswith(prefix)]


def test_a_wait_is_known_while_it_lasts_and_the_longest_comes_first() -> None:
    before = time.monotonic()
    with waiting_for("test a: the store", 60) as outer:
        with waiting_for("test a: cluster 1", 10):
            assert named("test a") == ["test a: the store", "test a: cluster 1"]
        assert named("test a") == ["test a: the store"]
        assert outer.thread == threading.get_ident()
        assert before <= outer.since <= time.monotonic()
        assert outer.due == outer.since + 30
    assert named("test a") == []


def test_a_wait_that_ends_by_an_error_is_over() -> None:
    with pytest.raises(RuntimeError, match="gone"), waiting_for("test b", 1):
        raise RuntimeError("gone")
    assert named("test b") == []


def test_what_is_waited_for_may_change_and_the_deadline_be_unknown() -> None:
    missing = ["1", "2"]
    with waiting_for(lambda: f"test c: clusters {', '.join(missing)}", None) as wait:
        assert named("test c") == ["test c: clusters 1, 2"]
        missing.remove("1")
        assert named("test c") == ["test c: clusters 2"]
        assert wait.due == wait.since + PATIENCE_SECONDS / 2


def test_waits_of_other_threads_are_seen_and_many_at_once_do_not_disturb_each_other() -> None:
    inside, leave = threading.Barrier(9), threading.Event()

    def wait(number: int) -> None:
        for round in range(200):
            with waiting_for(f"test d: {number}, {round}", 1):
                pass
        with waiting_for(f"test d: {number}", 1):
            inside.wait(60)
            leave.wait(60)

    threads = [threading.Thread(target=wait, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    while inside.n_waiting < 8:
        waits_under_way()  # must not fail while others come and go
    inside.wait(60)
    found = {w.thread: w.what for w in waits_under_way() if w.what.startswith("test d")}
    leave.set()
    for thread in threads:
        thread.join(60)
    assert found == {thread.ident: f"test d: {n}" for n, thread in enumerate(threads)}
    assert named("test d") == []


def test_what_recurs_ends_by_its_next_time() -> None:
    step = NextWait()
    for number in (1, 2):
        step.begin(f"test f: step {number}", 60)
        assert named("test f") == [f"test f: step {number}"]
    step.end()
    step.end()
    assert named("test f") == []


def test_a_wait_costs_the_waiting_thread_next_to_nothing() -> None:
    from timeit import repeat

    def wait() -> None:
        with waiting_for("test e", 600):
            pass

    assert min(repeat(wait, number=1000, repeat=5)) / 1000 < 50e-6  # some 1 us, on a quiet core
