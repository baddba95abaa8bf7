"""A process that has imported all that ranks need, and forks all ranks of a run from itself.

    python -m dsx.bench.start.forks JOB JOB ...

The runs are started one after another, the ranks of one all at once. Each that has started says
what it has found, a line on stdout, and stays until all have; "started" follows the last one. An
error of one ends all: it is the last line on stderr, and the exit status is 1.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import torch

from dsx.bench.start import rank as ranks
from dsx.bench.start.job import STARTED, Job

_LAST_IMPORTS = ("dsx.engines.attach", "torch.nn.parallel")
_OF_LINKS = (
    "dsx.comm.links.coming", "dsx.comm.links.desk", "dsx.comm.links.host_port",
    "dsx.comm.links.meeting", "dsx.comm.links.transport",
)  # fmt: skip


def main(jobs: Sequence[Job]) -> None:
    """Start all runs."""
    signal.signal(signal.SIGTERM, _end)
    _warm(_LAST_IMPORTS + (_OF_LINKS if any(job.keys for job in jobs) else ()))
    for job in jobs:
        start(job)
        print(STARTED, flush=True)


def start(job: Job) -> None:
    """Fork, let begin, wait for all, end them."""
    gate, open_gate = os.pipe()
    said: dict[int, tuple[int, int]] = {}  # by descriptor
    running: list[int] = []
    try:
        for cluster in range(job.num_clusters):
            for number in range(job.ranks):
                hears, says = os.pipe()
                pid = os.fork()
                if not pid:
                    os.close(open_gate)
                    _be(job, cluster, number, gate, says)
                os.close(says)
                running.append(pid)
                said[hears] = cluster, number
        os.close(open_gate)
        for line in _lines(said, time.monotonic() + job.deadline_seconds):
            print(line, flush=True)
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in running:
            os.waitpid(pid, 0)


def _end(number: int, frame: FrameType | None) -> None:
    """End, and with this process all ranks."""
    sys.exit(f"told to end by {signal.Signals(number).name}")


def _warm(modules: Sequence[str]) -> None:
    """Import what is imported at the first use: a rank of a run has done so before it starts."""
    torch.set_num_threads(1)
    for name in modules:
        importlib.import_module(name)
    model = ranks.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.zeros(1, 32)).sum().backward()
    optimizer.step()
    gc.freeze()  # children do not copy pages to look for garbage there


def _be(job: Job, cluster: int, number: int, gate: int, says: int) -> None:
    """Start as a rank; never returns."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        os.read(gate, 1)  # until it is closed
        found, _held = ranks.start(job, cluster, number)
        os.write(says, found.write().encode() + b"\n")
        time.sleep(job.deadline_seconds)  # it is ended before
    except BaseException as error:
        os.write(says, f"cluster {cluster}, rank {number}: {error}\n".encode())
    finally:
        os._exit(1)


def _lines(said: dict[int, tuple[int, int]], until: float) -> list[str]:
    """Return what all have said; SystemExit with the first error, or who has said nothing."""
    lines: list[str] = []
    parts = dict.fromkeys(said, b"")
    selector = selectors.DefaultSelector()
    for hears in said:
        selector.register(hears, selectors.EVENT_READ)
    while parts:
        ready = selector.select(max(until - time.monotonic(), 0))
        if not ready:
            cluster, number = said[next(iter(parts))]
            sys.exit(f"{len(parts)} ranks do not start, such as {number} of cluster {cluster}")
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            parts[key.fd] += data
            if data and not data.endswith(b"\n"):
                continue
            line = parts.pop(key.fd).decode().strip()
            selector.unregister(key.fd)
            os.close(key.fd)
            if not line.startswith("{"):
                cluster, number = said[key.fd]
                sys.exit(line or f"rank {number} of cluster {cluster} has died")
            lines.append(line)
    return lines


if __name__ == "__main__":
    main([Job.read(text) for text in sys.argv[1:]])
