"""Threads inside torch's C++ end before the interpreter does, or it ends by SIGABRT."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsx.core import at_exit

ROOT = Path(__file__).parents[2]
STOPS = """
import sys, threading
from datetime import timedelta
import torch.distributed as dist
import dsx.training.stops
from dsx.training.stops import Stops

class Slow:
    def __init__(self):
        self.store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        self.is_asked = threading.Event()
    def check(self, names):  # as long as on a long line
        self.is_asked.set()
        try:
            self.store.wait(["never"], timedelta(seconds=0.05))
        except RuntimeError:
            return False

class World:
    world_size, rank = 2, 0
    def __init__(self): self.store = Slow()
    def connect_own_store(self, name): return self.store

world = World()
stops = Stops(world, world, 1.0)
dsx.training.stops._LOOK_SECONDS = 0.0
threading.Thread(target=stops.wait_for_one, daemon=True).start()
assert world.store.is_asked.wait(30)
sys.exit(3)
"""


@pytest.mark.ci
def test_a_thread_that_asks_a_store_ends_before() -> None:
    """Without that the process says "terminate called without an active exception"."""
    done = subprocess.run(
        [sys.executable, "-c", STOPS], capture_output=True, text=True, timeout=120, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3 and "terminate called" not in done.stderr, done.stderr


class Open:
    """What a script has not closed."""

    def __init__(self, others: tuple[Open, ...] = ()) -> None:
        self.num_closed, self._others = 0, others
        at_exit.close_at_exit(self)

    def close(self) -> None:
        at_exit.has_closed(self)
        self.num_closed += 1
        for other in self._others:
            other.close()
        if self._others:
            raise RuntimeError("a peer has gone")


def test_what_is_open_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_exit, "_open", type(at_exit._open)())
    inner, closed = Open(), Open()
    outer = Open((inner,))
    closed.close()
    at_exit._close_all()
    assert inner.num_closed in (1, 2)  # by itself, and then as a part of the other
    at_exit._close_all()
    assert outer.num_closed == closed.num_closed == 1
