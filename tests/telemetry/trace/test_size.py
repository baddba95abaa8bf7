"""What a trace of 160 ranks and 1,000 steps takes, and what reading some of it does."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsx.core.membership import Seat
from dsx.telemetry.trace.parts import parts_of, trace_path
from dsx.telemetry.trace.recorder import Trace

NUM_STEPS, MICRO_BATCHES, RANKS = 1000, 240, 80  # of each of two clusters
WRITTEN = 2  # ranks of a cluster that are written; the others are copies
TRANSFER = (
    ("copy", "copy"), ("handshake", "meet"), ("encode", "encode"), ("codes", "network"),
    ("reduce", "reduce"), ("codes", "network"), ("decode", "decode"), ("sideband", "network"),
    ("sideband", "decode"),
)  # fmt: skip


class Clock:
    """Nanoseconds that pass as somebody says, in parts that no two spans share."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.at = 0

    def __call__(self) -> int:
        return self.at

    def passes(self, milliseconds: float) -> int:
        """Return when that began."""
        began = self.at
        self.at += int(1e6 * milliseconds * self.random.uniform(0.8, 1.2))
        return began


def take_step(trace: Trace, clock: Clock, step: int) -> None:
    for _ in range(MICRO_BATCHES):
        for name, milliseconds in (("forward", 11), ("backward", 23)):
            trace.add(name, name, clock.passes(milliseconds))
            clock.passes(0.05)
    began = clock.at
    timer = trace.span_timer("launch", step % 4, step)
    for part in ("read", "copy", "submit"):
        clock.passes(0.4)
        timer.mark(part)
    timer.end(launched=step)
    if step > 3:
        transfer(trace, clock, step - 3)
    clock.passes(2)
    trace.add("optimizer step", "optimizer", began)
    trace.end_step(step)


def transfer(trace: Trace, clock: Clock, step: int) -> None:
    own = threading.current_thread()
    before, own.name = own.name, f"dsx-fragment-{step % 4}"
    began, of = clock.at, {"fragment": step % 4, "launched": step}
    for number, (name, category) in enumerate(TRANSFER):
        counts = {"bytes": 3_000_128, "peers": [1], "round": number}
        facts = {**of, **counts} if category in ("network", "meet") else of
        trace.add(name, category, clock.passes(5), step, facts)
    trace.add("transfer", "transfer", began, step, {**of, "bytes": 6_000_304})
    own.name = before


def write_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cluster in range(2):
        for rank in range(WRITTEN):
            clock = Clock(1000 * cluster + rank)
            monkeypatch.setattr("dsx.telemetry.trace.recorder.now", clock)
            trace = Trace(trace_path(folder, cluster, rank), "s", Seat.of(0, 2), (1, NUM_STEPS))
            trace._offset = 10**18
            trace.begin(0)
            for step in range(1, NUM_STEPS + 1):
                take_step(trace, clock, step)
                if step % 50 == 0:  # as in a run, where a step takes seconds
                    trace.flush()
            trace.close()
            assert not trace._behind.missing.by_file()
    for (_, rank), paths in parts_of(folder).items():
        for copy in range(rank + WRITTEN, RANKS, WRITTEN):
            for path in paths:
                shutil.copy(path, str(path).replace(f"rank_{rank}.", f"rank_{copy}."))
    assert len(parts_of(folder)) == 2 * RANKS


def read(*arguments: object) -> tuple[str, float, float]:
    """Run `dsx trace`; return what it printed, its largest memory in MB, and seconds."""
    command = [sys.executable, "-m", "dsx", "trace", *map(str, arguments)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    print(" ".join(map(str, arguments[1:])), f"{time.monotonic() - began:.1f} s, {peak:.0f} MB")
    return done.stdout, peak, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_trace_of_160_ranks_and_1000_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under 1 GB, and little memory: of some steps, of some ranks, and of all of it."""
    write_trace(tmp_path, monkeypatch)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    print(f"{size / 1e6:.0f} MB")
    assert size < 1e9
    shown, peak, _ = read(tmp_path, "--last", 1, "--ranks", "0,3-7")
    assert "steps 1000 to 1000" in shown and "12 ranks" in shown and peak < 200
    shown, peak, _ = read(tmp_path, "--last", 20)
    assert "steps 981 to 1000" in shown and "160 ranks" in shown and peak < 300
    shown, peak, _ = read(tmp_path)
    assert "steps 1 to 1000" in shown and "160 ranks" in shown and peak < 600
    assert "no file: 79," in shown
    shutil.rmtree(tmp_path)
