"""A process that has imported all that a rank needs, and forks ranks from itself.

A rank is there in milliseconds so, where an import takes seconds. On stdin a JSON object per line
asks for a rank; on stdout one answers with its process, and one tells of each that has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(directory: Path) -> None:
    """Fork ranks of the run that has its job in this folder."""
    import torch

    from dsx.bench.chaos import worker
    from dsx.bench.chaos.disks import mount_disks
    from dsx.bench.chaos.engines.engine import module_of
    from dsx.bench.chaos.job import Job

    job = Job.read(directory)
    if job.has_disks:
        mount_disks(directory, job.num_clusters)
    importlib.import_module("dsx.comm.links.transport")
    module_of(job.engine).warm()
    torch.set_num_threads(1)
    serve(directory, lambda cluster, rank: worker.train(job, cluster, rank))


def serve(directory: Path, train: Callable[[int, int], None]) -> None:
    """Fork what is asked for, until stdin ends: each trains, as this rank of this cluster."""
    from dsx.bench.chaos.job import output_path

    wake, ended = os.pipe()
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(ended)
    signal.signal(signal.SIGCHLD, _wake)
    running: set[int] = set()
    _say(ready=os.getpid())
    buffer = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 512)
            for pid in _reap(running):
                running.discard(pid)
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:  # whoever drives the run has ended, and so do the ranks
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            asked: dict[str, Any] = json.loads(line)
            cluster, rank = asked["cluster"], asked["rank"]
            pid = os.fork()
            if not pid:
                _become(asked["environment"], output_path(directory, cluster, rank))
                status = 1
                try:
                    train(cluster, rank)
                    status = 0
                except SystemExit as end:  # a run that is told to end
                    status = end.code if isinstance(end.code, int) else 1
                except BaseException as error:
                    print(f"{type(error).__name__}: {error}", flush=True)
                finally:
                    os._exit(status)
            running.add(pid)
            _say(started=pid, cluster=cluster, rank=rank)


def _reap(running: set[int]) -> list[int]:
    gone: list[int] = []
    for pid in running:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            gone.append(pid)
            _say(ended=pid, status=os.waitstatus_to_exitcode(status))
    return gone


def _become(environment: dict[str, str], output: Path) -> None:
    """Be a rank: its environment, its output, and nothing of the nursery's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    empty = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, empty), (1, file), (2, file)):
        os.dup2(source, target)
    os.setsid()  # a signal for the driver's group is not for ranks


def _wake(*_: object) -> None:
    """Nothing: that a signal has come is in the pipe."""


def _say(**fields: Any) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
