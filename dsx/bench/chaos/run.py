"""A run with faults: starts clusters, does to them what was drawn, and waits that they go on."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from dsx.bench.chaos.faults import LOSSES, Fault
from dsx.bench.chaos.job import EngineName, Job, give_orders, log_path, orders_path, output_path
from dsx.bench.chaos.lines import Lines
from dsx.bench.chaos.logs import Record, Tail, Window, last
from dsx.comm.links.key_changes import add_key, make_key

_START_SECONDS = 180.0
_QUIET_STEPS = 4  # that all take before the next fault
_AHEAD = 5  # steps until a cluster spoils what it contributes
_LOOK_SECONDS = 0.02
_END_STEPS = 40


class NoProgress(RuntimeError):
    """Those who should go on do not."""


class Nursery:
    """The process that forks ranks."""

    def __init__(self, directory: Path) -> None:
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dsx.bench.chaos.nursery", str(directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            stderr=(directory / "nursery.log").open("ab"),
        )  # fmt: skip
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._buffer = b""

    def ask(self, **fields: Any) -> None:
        """Ask for a rank."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, seconds: float) -> list[dict[str, Any]]:
        """Return what it has said, waiting so long at most. NoProgress if it has ended."""
        if not self._selector.select(seconds):
            return []
        data = os.read(self._out, 1 << 16)
        if not data:
            raise NoProgress("the process that forks ranks has ended; see nursery.log")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End it; ranks are ended by their own numbers."""
        self._selector.close()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Clusters:
    """All clusters of a run: their processes, logs, lines, and who has been lost."""

    def __init__(self, job: Job, lines: Lines, nursery: Nursery) -> None:
        self._job, self._lines, self._nursery = job, lines, nursery
        self._directory = Path(job.directory)
        self._pids: dict[int, tuple[int, int]] = {}
        self.status: dict[tuple[int, int], int] = {}
        self.alive = list(range(job.num_clusters))
        ranks = [(c, r) for c in range(job.num_clusters) for r in range(job.num_ranks)]
        self.tails = {rank: Tail(log_path(self._directory, *rank)) for rank in ranks}
        self._clock = [0.0] * job.num_clusters

    def start(self) -> None:
        """Start every rank, and wait until all have trained some steps."""
        self._until(lambda: self._is_ready, _START_SECONDS, "the nursery is not ready")
        for cluster in range(self._job.num_clusters):
            self._launch(cluster)
        self._until_steps({c: _QUIET_STEPS for c in self.alive}, _START_SECONDS, "the start")

    def bring_back(self, cluster: int) -> float:
        """Start a cluster again, and wait until it trains with the others; return how long."""
        began, what = time.monotonic(), f"cluster {cluster} is started again"
        for rank in range(self._job.num_ranks):
            self.tails[cluster, rank].begins_anew()
        self._clock[cluster] = 0.0
        orders_path(self._directory, cluster).unlink(missing_ok=True)
        self._until(lambda: not self._has_processes(cluster), self._patience, what)
        self._launch(cluster)
        self.alive = sorted([*self.alive, cluster])
        self._until_steps({cluster: self._furthest() + 1}, _START_SECONDS, what)
        self._until(self._know_who_is_left, self._patience, f"{what}: not all know it")
        return time.monotonic() - began

    def suffer(self, fault: Fault) -> Window:
        """Do what is asked, and wait until all that are left have gone on; NoProgress if not."""
        began, cluster = time.monotonic(), fault.cluster
        seconds = 0.0
        if fault.kind in LOSSES:
            self._lose(fault)
        elif fault.kind == "pause":
            self._pause(cluster, fault.seconds)
        elif fault.kind == "reset":
            self._lines.reset(cluster)
        elif fault.kind in ("cut", "cut_one_way"):
            self._lines.hold(cluster, fault.seconds, fault.kind == "cut")
            seconds = fault.seconds
        elif fault.kind == "garble":
            self._lines.garble(cluster)
        elif fault.kind == "clock":
            self._clock[cluster] += fault.seconds
            give_orders(self._directory, cluster, clock=self._clock[cluster])
        else:
            step = self._furthest() + _AHEAD
            give_orders(self._directory, cluster, **{fault.kind: step})
            self._until(lambda: self._has_launched(cluster, step), self._patience, f"{fault}")
        time.sleep(seconds)
        self._look()
        steps = {c: self._furthest([c]) + _QUIET_STEPS for c in self.alive}
        self._until_steps(steps, self._patience, f"{fault}")
        self._until(self._know_who_is_left, self._patience, f"{fault}: not all know who is left")
        return Window(fault.kind, cluster, began, time.monotonic())

    def end(self) -> None:
        """Let all who are left come to one last step, and end."""
        step = self._furthest() + _END_STEPS
        for cluster in self.alive:
            give_orders(self._directory, cluster, last_step=step)
        self.finish()

    def finish(self) -> None:
        """Wait until all who are left have ended."""

        def have_ended() -> bool:
            return all(tail.has("end", "failed") for (c, _), tail in self.tails.items()
                       if c in self.alive)  # fmt: skip

        steps = self._job.last_step if self._job.last_step < 1_000_000 else _END_STEPS
        patience = self._patience + 20 * steps * max(self._job.step_seconds, 0.05)
        self._until(have_ended, patience, "the end of the run does not come")
        left = [pid for pid, (c, _) in self._pids.items() if c in self.alive]
        self._until(lambda: not {*left} & {*self._pids}, self._patience, "ranks do not end")

    def kill(self) -> None:
        """End what still runs."""
        for pid in [*self._pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> dict[int, int]:
        """Return whose cluster each process is of."""
        return {pid: cluster for pid, (cluster, _) in [*self._pids.items()]}

    def logs(self) -> dict[tuple[int, int], Sequence[Record]]:
        """Return what all ranks have written."""
        self._look()
        return {rank: tail.records for rank, tail in self.tails.items()}

    @property
    def _patience(self) -> float:
        return 30.0 + 3 * self._job.suspect_seconds

    def _lose(self, fault: Fault) -> None:
        """Kill a rank, and then, as a launcher does, the rest of its cluster."""
        self.alive.remove(fault.cluster)
        own = {rank: pid for pid, (c, rank) in self._pids.items() if c == fault.cluster}
        if fault.kind == "kill_rank":
            pid = own.pop(fault.rank)
            os.kill(pid, signal.SIGKILL)
            self._until(lambda: pid not in self._pids, self._patience, "a killed rank stays")
        for pid in own.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pause(self, cluster: int, seconds: float) -> None:
        own = [pid for pid, (c, _) in self._pids.items() if c == cluster]
        try:
            for pid in own:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            for pid in own:
                os.kill(pid, signal.SIGCONT)

    def _launch(self, cluster: int) -> None:
        """Have all ranks of a cluster started."""
        port, count = _free_port(), str(self._job.num_ranks)
        for rank in range(self._job.num_ranks):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count,
                "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            self._nursery.ask(cluster=cluster, rank=rank, environment=environment)

    def _has_processes(self, cluster: int) -> bool:
        return any(of == cluster for of, _ in self._pids.values())

    def _has_launched(self, cluster: int, step: int) -> bool:
        launch = last(self.tails[cluster, 0].records, "launch")
        return launch is not None and launch["step"] >= step

    def _furthest(self, clusters: Sequence[int] | None = None) -> int:
        among = self.alive if clusters is None else clusters
        return max(tail.step for (c, _), tail in self.tails.items() if c in among)

    def _know_who_is_left(self) -> bool:
        told = [
            last(tail.records, "step") for (c, _), tail in self.tails.items() if c in self.alive
        ]
        return all(step is not None and step["members"] == self.alive for step in told)

    def _until_steps(self, steps: dict[int, int], seconds: float, what: str) -> None:
        def have_come() -> bool:
            return all(tail.step >= steps.get(c, 0) for (c, _), tail in self.tails.items()
                       if c in self.alive)  # fmt: skip

        self._until(have_come, seconds, f"{what}: not all have gone on")

    def _until(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            self._look()
            for (cluster, rank), tail in self.tails.items():
                if cluster in self.alive and tail.has("failed"):
                    output = output_path(self._directory, cluster, rank)
                    raise NoProgress(
                        f"{what}: cluster {cluster}, rank {rank}, has failed: "
                        f"{tail.records[-1].get('why')} (its output is in {output})"
                    )
            if time.monotonic() > until:
                at = {rank: tail.step for rank, tail in self.tails.items()}
                raise NoProgress(f"{what} within {seconds:g} s; ranks are at steps {at}")

    _is_ready = False

    def _look(self) -> None:
        for told in self._nursery.hear(_LOOK_SECONDS):
            self._is_ready = self._is_ready or "ready" in told
            if "started" in told:
                self._pids[told["started"]] = (told["cluster"], told["rank"])
            if "ended" in told:
                self.status[self._pids.pop(told["ended"])] = told["status"]
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
) -> Generator[Clusters]:
    """Yield clusters that have begun to train, each with keys and a line of its own."""
    directory.mkdir(parents=True)
    ports = [_free_port() for _ in range(num_clusters)]
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
        last_step, step_seconds, suspect_seconds, seed, engine, zero_stage,
    )  # fmt: skip
    job.write()
    nursery = Nursery(directory)
    clusters = Clusters(job, lines, nursery)
    try:
        clusters.start()
        yield clusters
    finally:
        clusters.kill()
        nursery.close()
        lines.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]
