"""Runs of one engine, one after another: its ranks are asked for, waited for, and read."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

from dsx.bench.chaos.forking import Nursery
from dsx.bench.chaos.job import output_path
from dsx.bench.e2e.run import RunFailed
from dsx.bench.engines.job import Job, Seen, seen_path
from dsx.bench.free_ports import free_low_ports

_TAIL = 300  # characters of what a rank has said
_HEAR_SECONDS = 1.0


def meeting_place() -> str:
    """Return where the clusters of a run meet."""
    (port,) = free_low_ports(1)
    return f"tcp://127.0.0.1:{port}"


class Runs:
    """The runs of one engine in a folder; close it at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._nursery: Nursery | None = None
        self._running: dict[int, tuple[int, int]] = {}

    def train(self, job: Job) -> list[list[Seen]]:
        """Return what each rank has seen, by cluster and rank.

        RunFailed for a rank that has not come to the end, with the last that it has said.
        """
        ranks = job.combination.ranks
        everyone = [(m, rank) for m in range(job.num_clusters) for rank in range(ranks)]
        for who in everyone:
            output_path(self._directory, *who).unlink(missing_ok=True)
            seen_path(self._directory, *who).unlink(missing_ok=True)
        job.write(self._directory)
        if self._nursery is None:
            self._nursery = Nursery(self._directory, module="dsx.bench.engines.nursery")
        masters = free_low_ports(job.num_clusters)
        for cluster, rank in everyone:
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(masters[cluster]), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            }  # fmt: skip
            self._nursery.ask(cluster=cluster, rank=rank, environment=environment)
        self._wait(job, len(everyone))
        seen = [json.loads(seen_path(self._directory, *who).read_text()) for who in everyone]
        return [
            [Seen(**one) for one in seen[first : first + ranks]]
            for first in range(0, len(seen), ranks)
        ]

    def close(self) -> None:
        """End what is left of it."""
        self._kill()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def _wait(self, job: Job, count: int) -> None:
        """Wait until so many have ended, all well; else end all, and raise RunFailed.

        The deadline holds twice: until all have been started, and from then on.
        """
        until, started, ended = time.monotonic() + job.deadline_seconds, 0, 0
        assert self._nursery is not None
        while ended < count:
            for said in self._nursery.hear(_HEAR_SECONDS):
                if "started" in said:
                    self._running[said["started"]] = said["cluster"], said["rank"]
                    started += 1
                    if started == count:
                        until = time.monotonic() + job.deadline_seconds
                elif "ended" in said:
                    ended += 1
                    who = self._running.pop(said["ended"])
                    if said["status"]:
                        self._fail(who, f"has ended with {said['status']}")
            if time.monotonic() > until:
                late = next(iter(self._running.values()), (0, 0))
                self._fail(late, f"has not ended within {job.deadline_seconds:g} s")

    def _fail(self, who: tuple[int, int], what: str) -> None:
        """End all, and raise RunFailed; the next run begins with a new process."""
        self.close()
        path = output_path(self._directory, *who)
        said = path.read_text(errors="replace") if path.exists() else ""
        cluster, rank = who
        raise RunFailed(f"rank {rank} of cluster {cluster} {what}: {said[-_TAIL:].strip()}")

    def _kill(self) -> None:
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._running.clear()
