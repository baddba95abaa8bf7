"""A run on a testbed that a driver watches: clusters are started, killed, and started again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsx.bench.e2e.run import RunFailed
from dsx.bench.heal.job import Job, log_path, orders_path
from dsx.bench.line import shared_cores
from dsx.bench.testbed import Testbed
from dsx.bench.worker_files import read_log

_POLL_SECONDS = 0.1
_TAIL = 3000
_ENVIRONMENT = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
Record = dict[str, Any]


class Run:
    """The processes of one job. RunFailed where one ends that should not, or something is late."""

    def __init__(self, job: Job, bed: Testbed, deadline_seconds: float) -> None:
        self._job, self._bed, self._deadline_seconds = job, bed, deadline_seconds
        self.directory = Path(job.directory)
        self.clusters = range(job.clusters["num_clusters"])
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        job.write()

    def start(self, cluster: int, loads: bool = False) -> float:
        """Start a cluster's process; return when."""
        words = [sys.executable, "-m", "dsx.bench.heal.worker", "--directory", str(self.directory)]
        words += ["--cluster", str(cluster), *["--load"][: int(loads)]]
        # the last one, which is killed, has what the others leave it of the cores
        core = shared_cores(2)[cluster == self.clusters[-1]]
        with self._output(cluster).open("ab") as output:
            process = self._bed.start(cluster, words, _ENVIRONMENT, output, core)
        self._processes[cluster] = process
        return time.monotonic()

    def kill(self, clusters: Sequence[int]) -> None:
        """End processes at once, as SIGKILL does."""
        for cluster in clusters:
            process = self._processes.pop(cluster)
            process.kill()
            process.wait()

    def order(self, **given: int) -> None:
        """Tell all at which step to save (`save_at`), or which is the last (`last_step`)."""
        path = orders_path(self.directory)
        path.with_suffix(".new").write_text(json.dumps(given))
        path.with_suffix(".new").rename(path)

    def records(self, cluster: int) -> list[Record]:
        """Return what a cluster has written since the run began."""
        return read_log(log_path(self.directory, cluster))

    def steps(self, cluster: int, since: float = 0.0) -> list[Record]:
        """Return a cluster's steps that have ended since then."""
        return [r for r in self.records(cluster) if r["what"] == "step" and r["at"] >= since]

    def last_step(self) -> int:
        """Return the step that the first cluster has ended last."""
        return self.steps(0)[-1]["step"]

    def wait_for(self, what: str, cluster: int, since: float) -> Record:
        """Return the first record of a kind that a cluster writes after `since`."""

        def found() -> Record | None:
            of_kind = (r for r in self.records(cluster) if r["what"] == what)
            return next((r for r in of_kind if r["at"] >= since), None)

        return self._wait(found, f"cluster {cluster} to write {what!r}")

    def wait_for_step(self, cluster: int, step: int) -> Record:
        """Return a cluster's first record of that step or a later one."""
        return self._wait(
            lambda: next((r for r in self.steps(cluster) if r["step"] >= step), None),
            f"step {step} of cluster {cluster}",
        )

    def wait_for_members(self, cluster: int, members: Sequence[int], since: float) -> Record:
        """Return a cluster's first step after `since` that had those members."""
        return self._wait(
            lambda: next(
                (r for r in self.steps(cluster, since) if r["members"] == list(members)), None
            ),
            f"members {list(members)} in cluster {cluster}",
        )

    def wait_for_ends(self) -> None:
        """Wait until all have ended, with exit status 0."""
        for cluster, process in self._processes.items():
            try:
                status = process.wait(self._deadline_seconds)
            except subprocess.TimeoutExpired:
                raise RunFailed(f"cluster {cluster} has not ended: {self._tail(cluster)}") from None
            if status:
                raise RunFailed(f"cluster {cluster} has ended with {status}: {self._tail(cluster)}")

    def _wait(self, look: Callable[[], Record | None], what: str) -> Record:
        until = time.monotonic() + self._deadline_seconds
        while (found := look()) is None:
            for cluster, process in self._processes.items():
                if (status := process.poll()) is not None:
                    raise RunFailed(
                        f"cluster {cluster} has ended with {status} while the bench waited for "
                        f"{what}: {self._tail(cluster)}"
                    )
            if time.monotonic() > until:
                raise RunFailed(
                    f"{what} did not come within {self._deadline_seconds:g} s; cluster 0 has "
                    f"written: {self._tail(0)}"
                )
            time.sleep(_POLL_SECONDS)
        return found

    def _output(self, cluster: int) -> Path:
        return self.directory / f"cluster_{cluster}.log"

    def _tail(self, cluster: int) -> str:
        return self._output(cluster).read_text(errors="replace")[-_TAIL:].strip()
