"""The ranks of a Megatron-LM tree: of a torchrun per cluster, or forked with `--forked-ranks`.

An import of Megatron takes longer than a test's training. Forked, it comes once for all of a tree's
tests; what torchrun adds is left out then: its store, and its restarts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

from tests.distributed import free_port
from tests.launch.megatron_lm_on_cpu import RANK

_GRACE = 20.0  # seconds that the other ranks of a cluster have behind one that has failed


Started = Sequence[tuple[Sequence[str], Path]]  # the arguments and the log of each cluster


def launched(
    driver: Path, started: Started, ranks: int, environment: Mapping[str, str], seconds: float
) -> list[int]:
    """Run a torchrun per cluster; return how each has ended."""
    running: list[subprocess.Popen[bytes]] = []
    for arguments, log in started:
        launcher = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", str(ranks)]
        launcher += ["--master-port", str(free_port()), driver]
        with log.open("wb") as file:
            running.append(
                subprocess.Popen(
                    [*launcher, *arguments], stdout=file, stderr=subprocess.STDOUT,
                    env=dict(environment),
                )
            )  # fmt: skip
    try:
        return [process.wait(timeout=seconds) for process in running]
    finally:
        for process in running:
            process.kill()


class ForkedRanks:
    """A server of `megatron_lm_on_cpu.py`, for the tests of one tree."""

    def __init__(self, driver: Path, tree: Path, environment: Mapping[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, driver, "--serve", tree], env=dict(environment), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._told: Queue[str] = Queue()
        self._numbers = count()
        Thread(target=self._listen, daemon=True).start()

    def run(
        self, clusters: Started, ranks: int, environment: Mapping[str, str], seconds: float
    ) -> list[int]:
        """Run each cluster's ranks, by its arguments and log, in an environment.

        Return a status of each cluster: 0 where all its ranks have ended well. TimeoutError where
        one has not ended in time.
        """
        numbers = [[next(self._numbers) for _ in range(ranks)] for _ in clusters]
        running = {number: m for m, own in enumerate(numbers) for number in own}
        for (arguments, log), own in zip(clusters, numbers, strict=True):
            port = str(free_port())
            for rank, number in enumerate(own):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                place |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
                place |= {"MASTER_PORT": port}
                self._ask(number, {**environment, **place}, arguments, log)
        pids: dict[int, int] = {}
        statuses, failed_at = [0] * len(clusters), [float("inf")] * len(clusters)
        end = time.monotonic() + seconds
        while running:
            if (told := self._next()) is not None:
                number, pid, status = told
                pids[number] = pid
                if status is not None:
                    cluster = running.pop(number)
                    if status and not statuses[cluster]:
                        statuses[cluster], failed_at[cluster] = status, time.monotonic()
            is_late = time.monotonic() > end
            for number, cluster in running.items():
                if number in pids and (is_late or time.monotonic() > failed_at[cluster] + _GRACE):
                    os.kill(pids[number], signal.SIGKILL)
            if is_late:
                raise TimeoutError(f"{len(running)} ranks have not ended within {seconds} s")
        return statuses

    def close(self) -> None:
        """End the server, and what it has forked."""
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def _ask(
        self, number: int, environment: Mapping[str, str], arguments: Sequence[str], log: Path
    ) -> None:
        asked = {"number": number, "environment": environment, "log": str(log)}
        asked["arguments"] = [str(each) for each in arguments]
        assert self._server.stdin
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()

    def _next(self) -> tuple[int, int, int | None] | None:
        """Return what is told next; None where nothing is for a while."""
        try:
            number, pid, status = json.loads(self._told.get(timeout=0.5))
        except Empty:
            if self._server.poll() is not None:
                status = self._server.returncode
                raise RuntimeError(f"the server of ranks has ended with {status}") from None
            return None
        return number, pid, status

    def _listen(self) -> None:
        assert self._server.stdout
        for line in self._server.stdout:
            if line.startswith(RANK):
                self._told.put(line[len(RANK) :])
