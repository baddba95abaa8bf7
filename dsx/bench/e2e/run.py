"""One run of `dsx bench e2e` on a testbed: a `deepspeed` launcher in every cluster, one core each.

The line is lifted while launchers start and while they end, and throttled from the first step to
the last transfer.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.bench.e2e.job import Job
from dsx.bench.kinds import GLOO, Kind
from dsx.bench.testbed import INTERFACE, Line, Testbed

_LAUNCHER_PORT, _RENDEZVOUS_PORT = 29500, 29400
_POLL_SECONDS = 0.05
_LEAVE_SECONDS = 120.0
_TAIL = 2000  # characters of a failed worker's output
_WORKER = "dsx.bench.e2e.worker"


class RunFailed(RuntimeError):
    """A launcher has ended with an error, or a run has missed its deadline."""


@dataclass(frozen=True)
class Block:
    """Some rounds between two ceilings, in seconds per step; means of the clusters.

    Clusters that meet go at the pace of the slowest: what another's core is faster counts as lost.
    `wait_seconds`: in which training waited for others, as counted by dsx; nan of other libraries,
    as `transfer_seconds`, those of the transfers that were applied.
    """

    step_seconds: float
    ceiling_seconds: float
    wait_seconds: float = math.nan
    transfer_seconds: float = math.nan

    @property
    def utilization(self) -> float:
        """The ceiling over what was measured next to it."""
        return self.ceiling_seconds / self.step_seconds

    @property
    def overlap(self) -> float:
        """The share of the transfers' seconds in which training went on; nan without transfers."""
        if not self.transfer_seconds > 0:
            return math.nan
        return max(0.0, 1 - self.wait_seconds / self.transfer_seconds)


@dataclass(frozen=True)
class Measured:
    """What a run's clusters have written, one record per cluster; see worker.py."""

    clusters: Sequence[dict[str, Any]]

    def blocks(self, interval: int) -> list[Block]:
        """Return the blocks without their first rounds: pauses let transfers end before their time.

        The ceiling is taken to change steadily from the one before to the one after, and is that at
        the middle of what is left.
        Means and not medians of the ceiling's steps: a round's time is a sum, too, with whatever
        disturbs a machine.
        """
        per_cluster = [_blocks(record, interval) for record in self.clusters]
        return [
            Block(
                statistics.fmean(block.step_seconds for block in blocks),
                statistics.fmean(block.ceiling_seconds for block in blocks),
                statistics.fmean(block.wait_seconds for block in blocks),
                statistics.fmean(block.transfer_seconds for block in blocks),
            )
            for blocks in zip(*per_cluster, strict=True)
        ]

    def step_seconds(self, interval: int) -> float:
        """Return seconds per step, of a run without blocks: the mean of the clusters.

        The median over whole periods of `interval` steps but the first.
        """
        return statistics.fmean(
            statistics.median(_periods([s["seconds"] for s in record["steps"]], interval)[1:])
            for record in self.clusters
        )

    def sent(self) -> tuple[int, int]:
        """Return payload and, by the kernel, wire bytes of the cluster that sends most."""
        most = max(self.clusters, key=lambda record: record["bytes_sent"])
        return most["bytes_sent"], most["wire_bytes"]

    def mean(self, key: str) -> float:
        """Return the clusters' mean."""
        return statistics.fmean(record[key] for record in self.clusters)


def _blocks(record: dict[str, Any], interval: int) -> list[Block]:
    ends = [0.0, *(step["seconds"] for step in record["steps"])]
    waited, under_way = (
        [0.0, *(step.get(key, math.nan) for step in record["steps"])]
        for key in ("wait_seconds", "transfer_seconds")
    )
    ceilings = [statistics.fmean(steps) for steps in record["ceilings"]]
    length = len(record["steps"]) // (len(ceilings) - 1)
    blocks: list[Block] = []
    middle = (interval + length) / (2 * length)
    for number, (before, after) in enumerate(zip(ceilings, ceilings[1:], strict=False)):
        begin, end = number * length + interval, (number + 1) * length
        seconds = (ends[end] - ends[begin]) / (end - begin)
        counted = [(of[end] - of[begin]) / (end - begin) for of in (waited, under_way)]
        blocks.append(Block(seconds, before + middle * (after - before), *counted))
    return blocks


def _periods(cumulative: Sequence[float], interval: int) -> list[float]:
    """Return seconds per step of each whole period, given the time at the end of every step."""
    ends = [0.0, *cumulative[interval - 1 :: interval]]
    return [(end - begin) / interval for begin, end in zip(ends, ends[1:], strict=False)]


class Runner:
    """Starts jobs on a testbed, one after the other.

    `watch` is called with a run's directory while its clusters train, some times a second.
    """

    def __init__(self, bed: Testbed, cores: Sequence[int], deadline_seconds: float) -> None:
        self._bed = bed
        self._cores = cores
        self._deadline_seconds = deadline_seconds
        self.watch: Callable[[Path], None] = lambda directory: None

    def clusters_block(self) -> dict[str, Any]:
        """Return the "clusters" part of a JSON for this testbed."""
        return {
            "num_clusters": self._bed.num_clusters,
            "rendezvous": f"tcp://{self._bed.address(0)}:{_RENDEZVOUS_PORT}",
            "interface": INTERFACE,
            "deadline_seconds": self._deadline_seconds,
        }

    def meeting(self, kind: Kind, place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts "clusters" and "link" of a JSON; keys are made in a folder of `place`.

        One folder has all secrets: the clusters are of one host.
        """
        clusters = self.clusters_block()
        link: dict[str, Any] = {"security": kind.security}
        if kind == GLOO:
            return clusters, link
        del clusters["rendezvous"]
        names = [f"cluster-{m}" for m in range(self._bed.num_clusters)]
        members = [f"{n}={self._bed.address(m)}:{_RENDEZVOUS_PORT}" for m, n in enumerate(names)]
        link |= {"transport": "link", "members": members, "port": _RENDEZVOUS_PORT}
        if kind.security == "curve":
            from dsx.comm.links.key_changes import make_key

            keys = place / "keys"
            shutil.rmtree(keys, ignore_errors=True)
            for name in names:
                make_key(keys, name)
            link["keys"] = str(keys)
        return clusters, link

    def run(self, job: Job, line: Line | None, worker: str = _WORKER) -> Measured:
        """Run a job in the directory it names to its end; RunFailed has its output."""
        path, clusters = job.write(), range(self._bed.num_clusters)
        commands = [self._launcher(cluster, job, path, worker) for cluster in clusters]
        return self.run_commands(path.parent, commands, line)

    def run_commands(
        self, directory: Path, commands: Sequence[Sequence[str]], line: Line | None
    ) -> Measured:
        """Run a worker per cluster to its end, each taking its turns as loop.py has them."""
        self._bed.throttle(None)
        clusters = range(self._bed.num_clusters)
        processes = [self._start(m, directory, commands[m]) for m in clusters]
        try:
            self._wait_for("ready", directory, processes)
            self._bed.throttle(line)
            (directory / "go").touch()
            self._wait_for("drained", directory, processes)
            self._bed.throttle(None)
            (directory / "leave").touch()
            self._wait_for("cluster", directory, processes, ".json")
            for cluster, process in enumerate(processes):
                if process.wait(_LEAVE_SECONDS):
                    raise self._failed(cluster, directory)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(
                f"a launcher of {directory.name} has not ended within {_LEAVE_SECONDS:g} s of its "
                f"results; its output is in {directory}"
            ) from error
        finally:
            self._bed.end_processes()
        return Measured([json.loads(_file(directory, "cluster", m, ".json").read_text())
                         for m in clusters])  # fmt: skip

    def _launcher(self, cluster: int, job: Job, path: Path, worker: str) -> list[str]:
        launcher = shutil.which("deepspeed", path=str(Path(sys.executable).parent)) or "deepspeed"
        command = [launcher, "--master_port", str(_LAUNCHER_PORT)]
        if job.mode == "data_parallel":  # one launcher's world over all clusters
            hosts = path.parent / "hosts"
            addresses = [self._bed.address(m) for m in range(self._bed.num_clusters)]
            hosts.write_text("".join(f"{address} slots=1\n" for address in addresses))
            command += ["--hostfile", str(hosts), "--no_ssh", "--node_rank", str(cluster)]
            command += ["--master_addr", addresses[0]]
        else:
            command += ["--num_gpus", "1"]
        command += ["--module", worker]
        command += ["--job", str(path), "--cluster", str(cluster)]
        if job.mode == "dsx":
            command += ["--dsx-cluster-id", str(cluster)]
        return command

    def _start(
        self, cluster: int, directory: Path, command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        environment = {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": str(directory / "extensions"),
        }
        with _log(directory, cluster).open("wb") as log:
            return self._bed.start(cluster, command, environment, log, self._cores[cluster])

    def _wait_for(
        self,
        what: str,
        directory: Path,
        processes: Sequence[subprocess.Popen[bytes]],
        suffix: str = "",
    ) -> None:
        until = time.monotonic() + self._deadline_seconds
        waiting = {m: _file(directory, what, m, suffix) for m in range(len(self._cores))}
        while waiting := {m: path for m, path in waiting.items() if not path.exists()}:
            # before the last files no launcher may end, and none without its own
            ended = {m: status for m, p in enumerate(processes) if (status := p.poll()) is not None}
            for cluster, status in ended.items():
                if status or not _file(directory, "cluster", cluster, ".json").exists():
                    raise self._failed(cluster, directory)
            if time.monotonic() > until:
                raise RunFailed(
                    f"clusters {sorted(waiting)} of {directory.name} are not {what} within "
                    f"{self._deadline_seconds:g} s; their output is in {directory}"
                )
            self.watch(directory)
            time.sleep(_POLL_SECONDS)

    def _failed(self, cluster: int, directory: Path) -> RunFailed:
        tail = _log(directory, cluster).read_text()[-_TAIL:]
        return RunFailed(f"cluster {cluster} of {directory.name} has failed:\n{tail}")


def _file(directory: Path, what: str, cluster: int, suffix: str = "") -> Path:
    return directory / f"{what}_{cluster}{suffix}"


def _log(directory: Path, cluster: int) -> Path:
    return directory / f"cluster_{cluster}.log"
