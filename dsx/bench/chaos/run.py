"""A run of real processes: starts clusters, again, too; waits that they go on; ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from dsx.bench.chaos.disks import APART, Disks
from dsx.bench.chaos.forking import NoProgress, Nursery
from dsx.bench.chaos.job import (
    EngineName,
    Job,
    give_orders,
    log_path,
    orders_path,
    output_path,
)
from dsx.bench.chaos.lines import Lines
from dsx.bench.chaos.logs import Record, Tail, last, note_exit, of_each_process
from dsx.bench.free_ports import free_ports
from dsx.comm.links.key_changes import add_key, make_key

_START_SECONDS = 180.0
QUIET_STEPS = 4  # that all take before the next fault
_LOOK_SECONDS = 0.02
_END_STEPS = 40
_READ_AGAIN_STEPS = 200  # in which the others read what one has read and not committed


class Clusters:
    """All clusters of a run: their processes, logs, lines, and who has been lost."""

    def __init__(self, job: Job, lines: Lines, nursery: Nursery) -> None:
        self.job, self.lines, self._nursery = job, lines, nursery
        self.directory = Path(job.directory)
        self.disks = Disks(nursery.pid, self.directory) if job.has_disks else None
        self.pids: dict[int, tuple[int, int]] = {}
        self.alive = list(range(job.num_clusters))
        ranks = [(c, r) for c in range(job.num_clusters) for r in range(job.num_ranks)]
        self.tails = {rank: Tail(log_path(self.directory, *rank)) for rank in ranks}
        self.clock = [0.0] * job.num_clusters

    def start(self) -> None:
        """Start every rank, and wait until all have trained some steps."""
        self.until(lambda: self._is_ready, "the nursery is not ready", _START_SECONDS)
        for cluster in range(self.job.num_clusters):
            self._launch(cluster)
        self.until_steps({c: QUIET_STEPS for c in self.alive}, "the start", _START_SECONDS)

    def bring_back(self, cluster: int) -> float:
        """Start a cluster again, and wait until it trains with the others; return how long."""
        began, what = time.monotonic(), f"cluster {cluster} is started again"
        self.until(lambda: not self.has_processes(cluster), what)
        for rank in range(self.job.num_ranks):
            self.tails[cluster, rank].begins_anew()
        self.clock[cluster] = 0.0
        orders_path(self.directory, cluster).unlink(missing_ok=True)
        self._launch(cluster)
        self.alive = sorted([*self.alive, cluster])
        self.until_steps({cluster: self.furthest() + 1}, what, _START_SECONDS)
        self.until(self.know_who_is_left, f"{what}: not all know it")
        return time.monotonic() - began

    def end(self) -> int:
        """Let all who are left come to one last step, and end; return that step."""
        step = self.furthest() + _END_STEPS
        if (
            any(len(of_each_process(t.records)) > 1 for t in self.tails.values())
            or len(self.alive) < self.job.num_clusters
        ):
            step += _READ_AGAIN_STEPS
        for cluster in self.alive:
            give_orders(self.directory, cluster, last_step=step)
        self.finish()
        return step

    def finish(self) -> None:
        """Wait until all who are left have ended."""

        def have_ended() -> bool:
            return all(tail.has("end", "failed") for (c, _), tail in self.tails.items()
                       if c in self.alive)  # fmt: skip

        steps = self.job.last_step
        steps = steps if steps < 1_000_000 else _END_STEPS + _READ_AGAIN_STEPS
        patience = self.patience + 20 * steps * max(self.job.step_seconds, 0.05)
        self.until(have_ended, "the end of the run does not come", patience)
        left = [pid for pid, (c, _) in self.pids.items() if c in self.alive]
        self.until(lambda: not {*left} & {*self.pids}, "ranks do not end")

    def kill(self) -> None:
        """End what still runs."""
        for pid in [*self.pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> dict[int, int]:
        """Return whose cluster each process is of."""
        return {pid: cluster for pid, (cluster, _) in [*self.pids.items()]}

    def logs(self) -> dict[tuple[int, int], Sequence[Record]]:
        """Return what all ranks have written."""
        self.look()
        return {rank: tail.records for rank, tail in self.tails.items()}

    @property
    def patience(self) -> float:
        """How long those who are left may take to go on, in seconds."""
        return 30.0 + 3 * self.job.suspect_seconds

    def _launch(self, cluster: int) -> None:
        """Have all ranks of a cluster started."""
        port, count = *free_ports(1), str(self.job.num_ranks)
        for rank in range(self.job.num_ranks):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count,
                "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            self._nursery.ask(cluster=cluster, rank=rank, environment=environment)

    def has_processes(self, cluster: int) -> bool:
        """Return whether any rank of a cluster runs."""
        return any(of == cluster for of, _ in self.pids.values())

    def leader(self) -> int | None:
        """Return who leads the log, if all that are there agree."""
        told = [last(self.tails[c, 0].records, "step") for c in self.alive]
        leaders = {None if step is None else step["leader"] for step in told}
        return leaders.pop() if len(leaders) == 1 and leaders <= {*self.alive} else None

    def furthest(self, clusters: Sequence[int] | None = None) -> int:
        """Return the last step that any rank has taken, of all that are there or of some."""
        among = self.alive if clusters is None else clusters
        return max(tail.step for (c, _), tail in self.tails.items() if c in among)

    def know_who_is_left(self) -> bool:
        """Return whether all that are there train with all that are there."""
        told = [
            last(tail.records, "step") for (c, _), tail in self.tails.items() if c in self.alive
        ]
        return all(step is not None and step["members"] == self.alive for step in told)

    def until_steps(self, steps: dict[int, int], what: str, seconds: float | None = None) -> None:
        """Wait until all ranks have come to the step of their cluster. NoProgress if not."""

        def have_come() -> bool:
            return all(tail.step >= steps.get(c, 0) for (c, _), tail in self.tails.items()
                       if c in self.alive)  # fmt: skip

        self.until(have_come, f"{what}: not all have gone on", seconds)

    def until(self, is_so: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Wait, for `seconds` or as long as patience lasts; NoProgress where anybody fails."""
        seconds = self.patience if seconds is None else seconds
        until = time.monotonic() + seconds
        while not is_so():
            self.look()
            for (cluster, rank), tail in self.tails.items():
                if cluster in self.alive and (why := tail.failure):
                    output = output_path(self.directory, cluster, rank)
                    raise NoProgress(
                        f"{what}: cluster {cluster}, rank {rank}, has failed: {why} (its output is "
                        f"in {output})"
                    )
            if time.monotonic() > until:
                at = {rank: tail.step for rank, tail in self.tails.items()}
                raise NoProgress(f"{what} within {seconds:g} s; ranks are at steps {at}")

    _is_ready = False

    def look(self) -> None:
        """Take what the nursery and the logs have to tell."""
        for told in self._nursery.hear(_LOOK_SECONDS):
            self._is_ready = self._is_ready or "ready" in told
            if "started" in told:
                self.pids[told["started"]] = (told["cluster"], told["rank"])
            if "ended" in told:
                rank = self.pids.pop(told["ended"])
                note_exit(log_path(self.directory, *rank), told["status"])
        for tail in self.tails.values():
            tail.look()


@contextlib.contextmanager
def clusters_of(
    directory: Path,
    preset: str,
    num_clusters: int,
    num_ranks: int,
    seed: int,
    step_seconds: float,
    suspect_seconds: float,
    last_step: int = 1_000_000,
    engine: EngineName = "torch",
    zero_stage: int = 1,
    has_disks: bool = False,
) -> Generator[Clusters]:
    """Yield clusters that have begun to train, each with keys and a line of its own."""
    directory.mkdir(parents=True)
    ports = free_ports(num_clusters)
    names = [f"site-{cluster}" for cluster in range(num_clusters)]
    keys = [directory / "keys" / name for name in names]
    made = [make_key(folder, name)[-1] for folder, name in zip(keys, names, strict=True)]
    for cluster, folder in enumerate(keys):
        for other, key in enumerate(made):
            if other != cluster:
                add_key(folder, key)
    clusters: Clusters | None = None
    lines = Lines(ports, lambda: clusters.processes() if clusters is not None else {})
    members = [f"{n}={a}" for n, a in zip(names, lines.addresses, strict=True)]
    job = Job(
        str(directory), preset, num_clusters, num_ranks, members, ports, [str(k) for k in keys],
        last_step, step_seconds, suspect_seconds, seed, engine, zero_stage, has_disks,
    )  # fmt: skip
    job.write()
    nursery = Nursery(directory, APART if has_disks else ())
    clusters = Clusters(job, lines, nursery)
    try:
        clusters.start()
        yield clusters
    finally:
        clusters.kill()
        nursery.close()
        lines.close()
