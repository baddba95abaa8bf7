"""A run of torchft: its groups and its lighthouse, started, again, too, and waited for.

A group that ends by itself is started again, as its launcher would, and that is counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from dsx.bench.chaos.against.job import LIGHTHOUSE, GroupJob
from dsx.bench.chaos.forking import NoProgress, Nursery
from dsx.bench.chaos.job import give_orders, log_path
from dsx.bench.chaos.logs import Rank, Record, Tail, last, note_exit

QUIET_STEPS = 4  # that all take before the next fault, as in dsx's run
_LOOK_SECONDS = 0.02
_PATIENCE_SECONDS = 240.0  # beyond what any timeout of torchft's takes, by far
_STEP_PATIENCE_SECONDS = 1.0
_MOST_OWN_ENDS = 20
_MODULE = "dsx.bench.chaos.against.nursery"


class Groups:
    """All groups of a run: their processes, logs, and who is there."""

    def __init__(self, job: GroupJob, nursery: Nursery) -> None:
        self.job, self._nursery = job, nursery
        self.directory = Path(job.directory)
        self.pids: dict[int, int] = {}  # processes to clusters
        self.alive = list(range(job.num_clusters))
        self.own_ends: list[str] = []
        self.tails = {c: Tail(log_path(self.directory, c, 0)) for c in self.alive}

    def start(self) -> None:
        """Start all, and wait until all train with all."""
        self.until(lambda: self._is_ready, "the nursery is not ready")
        self.launch(LIGHTHOUSE)
        self.until(self._is_answered, "the lighthouse does not answer")
        for cluster in self.alive:
            self.launch(cluster)
        self.until_all_go_on("the start")

    def launch(self, cluster: int) -> None:
        """Have a group started, or the lighthouse."""
        if cluster != LIGHTHOUSE:
            self.tails[cluster].begins_anew()
        self._nursery.ask(cluster=cluster, rank=0, environment={})

    def bring_back(self, cluster: int) -> None:
        """Start a group again, and wait until it trains with the others."""
        what = f"group {cluster} is started again"
        self.until(lambda: not self.processes_of(cluster), what)
        furthest = max(tail.step for c, tail in self.tails.items() if c in self.alive)
        self.launch(cluster)
        self.alive = sorted([*self.alive, cluster])
        self.until(lambda: self.tails[cluster].step > furthest, what)
        self.until(self.know_who_is_left, f"{what}: not all know it")

    def end(self, round_: int) -> int:
        """Let all come to a round, of those to come at least; return it."""
        every = self.job.every
        now = max(tail.step for tail in self.tails.values()) // every
        round_ = max(round_, now + self.job.fragments)
        for cluster in self.alive:
            give_orders(self.directory, cluster, last_step=round_)
        seconds = (round_ - now) * every * max(_STEP_PATIENCE_SECONDS, 4 * self.job.step_seconds)
        self.until(
            lambda: all(self.tails[c].has("end") for c in self.alive),
            "the end of the run does not come", _PATIENCE_SECONDS + seconds,
        )  # fmt: skip
        return round_

    def kill(self) -> None:
        """End what still runs."""
        for pid in [*self.pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes_of(self, cluster: int) -> list[int]:
        """Return the processes of a group, or of the lighthouse: one or none."""
        return [pid for pid, of in self.pids.items() if of == cluster]

    def logs(self) -> dict[Rank, Sequence[Record]]:
        """Return what all groups have written."""
        self.look()
        return {(cluster, 0): tail.records for cluster, tail in self.tails.items()}

    def until_all_go_on(self, what: str) -> None:
        """Wait until all that are there have trained on, with all that are there."""
        steps = {c: self.tails[c].step + QUIET_STEPS for c in self.alive}
        self.until(
            lambda: all(self.tails[c].step >= step for c, step in steps.items()),
            f"{what}: not all have gone on",
        )
        self.until(self.know_who_is_left, f"{what}: not all know who is left")

    def know_who_is_left(self) -> bool:
        """Return whether all that are there are in a process group of all that are there."""
        told = [last(self.tails[c].records, "step") for c in self.alive]
        return all(step is not None and step["members"] == self.alive for step in told)

    def until(self, is_so: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Wait, for `seconds` or as long as patience lasts. NoProgress if it does not come."""
        seconds = _PATIENCE_SECONDS if seconds is None else seconds
        until = time.monotonic() + seconds
        while not is_so():
            self.look()
            if len(self.own_ends) > _MOST_OWN_ENDS:
                raise NoProgress(f"{what}: groups end by themselves: {self.own_ends[-1]}")
            if time.monotonic() > until:
                at = {cluster: tail.step for cluster, tail in self.tails.items()}
                raise NoProgress(f"{what} within {seconds:g} s; groups are at steps {at}")

    _is_ready = False

    def look(self) -> None:
        """Take what the nursery and the logs have to tell; start again who has ended by itself."""
        for told in self._nursery.hear(_LOOK_SECONDS):
            self._is_ready = self._is_ready or "ready" in told
            if "started" in told:
                self.pids[told["started"]] = told["cluster"]
            if "ended" in told:
                cluster = self.pids.pop(told["ended"])
                if cluster == LIGHTHOUSE:  # who has killed it starts it again
                    continue
                note_exit(log_path(self.directory, cluster, 0), told["status"])
                tail = self.tails[cluster]
                tail.look()
                if cluster in self.alive:
                    why = tail.failure or f"exit status {told['status']}"
                    self.own_ends.append(f"group {cluster} has ended by itself: {why}")
                    self.launch(cluster)
        for tail in self.tails.values():
            tail.look()

    def _is_answered(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.job.lighthouse_port), 1.0).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def groups_of(job: GroupJob) -> Generator[Groups]:
    """Yield groups that all train with each other, and end them."""
    directory = Path(job.directory)
    directory.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as one:
        job = replace(job, lighthouse_port=one.getsockname()[1])
    job.write()
    nursery = Nursery(directory, module=_MODULE)
    groups = Groups(job, nursery)
    try:
        groups.start()
        yield groups
    finally:
        groups.kill()
        nursery.close()
