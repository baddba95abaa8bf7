"""What is done to a run: each fault, and the wait until all that are left have gone on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from dsx.bench.chaos.departing import tell_to_leave
from dsx.bench.chaos.faults import LOSSES, Fault
from dsx.bench.chaos.forking import NoProgress
from dsx.bench.chaos.job import checkpoints_path, give_orders
from dsx.bench.chaos.logs import Window, last
from dsx.bench.chaos.run import QUIET_STEPS, Clusters

_AHEAD = 5  # steps until a cluster spoils what it contributes
_FEWEST_THAT_GO_ON = 2


class Inflictor:
    """Does faults to the clusters of a run."""

    def __init__(self, run: Clusters) -> None:
        self._run = run

    def aim(self, fault: Fault) -> Fault:
        """Return a fault with the cluster that it is to befall: one that leads, is there, is not.

        Whom a drawn fault names may be in another place by now, as who leads cannot be drawn.
        """
        among, cluster = self._run.alive, fault.cluster
        if fault.kind == "kill_leader":
            self._run.until(lambda: self._run.leader() is not None, "nobody leads the log")
            return replace(fault, cluster=self._run.leader())
        if fault.kind == "join":
            among = [c for c in range(self._run.job.num_clusters) if c not in self._run.alive]
        return fault if cluster in among else replace(fault, cluster=among[cluster % len(among)])

    def suffer(self, fault: Fault) -> Window:
        """Do what is asked, and wait until all that are left have gone on; NoProgress if not."""
        began, cluster = time.monotonic(), fault.cluster
        seconds = 0.0
        if fault.kind in LOSSES:
            self._lose(fault)
            if len(self._run.alive) < _FEWEST_THAT_GO_ON:  # it waits until the other one is back
                return Window(fault.kind, cluster, began, time.monotonic())
        elif fault.kind == "leave":
            self._let_leave(fault)
        elif fault.kind == "join":
            self._empty_folder(cluster)
            self._run.bring_back(cluster)
        elif fault.kind == "full_disk":
            self._fill_disk(cluster)
        elif fault.kind == "pause":
            self._pause(cluster, fault.seconds)
        elif fault.kind == "reset":
            self._run.lines.reset(cluster)
        elif fault.kind in ("cut", "cut_one_way"):
            self._run.lines.hold(cluster, fault.seconds, fault.kind == "cut")
            seconds = fault.seconds
        elif fault.kind == "garble":
            self._run.lines.garble(cluster)
        elif fault.kind == "clock":
            self._run.clock[cluster] += fault.seconds
            give_orders(self._run.directory, cluster, clock=self._run.clock[cluster])
        else:
            step = self._run.furthest() + _AHEAD
            give_orders(self._run.directory, cluster, **{fault.kind: step})
            self._run.until(lambda: self._has_launched(cluster, step), f"{fault}")
        time.sleep(seconds)
        self._run.look()
        steps = {c: self._run.furthest([c]) + QUIET_STEPS for c in self._run.alive}
        self._run.until_steps(steps, f"{fault}")
        self._run.until(self._run.know_who_is_left, f"{fault}: not all know who is left")
        return Window(fault.kind, cluster, began, time.monotonic())

    def _lose(self, fault: Fault) -> None:
        """Kill a rank, and then, as a launcher does, the rest of its cluster."""
        self._run.alive.remove(fault.cluster)
        own = {rank: pid for pid, (c, rank) in self._run.pids.items() if c == fault.cluster}
        if fault.kind == "kill_rank":
            pid = own.pop(fault.rank)
            os.kill(pid, signal.SIGKILL)
            self._run.until(lambda: pid not in self._run.pids, "a killed rank stays")
        for pid in own.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _let_leave(self, fault: Fault) -> None:
        """Have a cluster leave, once it has a place to save to; wait until it has gone."""
        cluster, what = fault.cluster, f"{fault}"
        self._run.until(lambda: self._all_have(cluster, "saved"), f"{what}: unsaved")
        command = None
        if fault.by_order:
            command = tell_to_leave(
                self._run.job, cluster, next(c for c in self._run.alive if c != cluster)
            )
        else:
            os.kill(self._pid_of(cluster, fault.rank), signal.SIGTERM)
        self._run.alive.remove(cluster)
        try:
            self._run.until(lambda: not self._run.has_processes(cluster), f"{what}: stays")
            if command is not None and command.wait(self._run.patience):
                raise NoProgress(f"{what}: dsx ctl ends with {command.returncode}; see ctl.log")
        finally:
            if command is not None:
                command.kill()
                command.wait()

    def _empty_folder(self, cluster: int) -> None:
        """Take away what a cluster has saved: its next machine has nothing of it."""
        disks = self._run.disks
        folder = checkpoints_path(self._run.directory, cluster)
        folder = folder if disks is None else disks.folder(cluster)
        for saved in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(saved, ignore_errors=True)

    def _fill_disk(self, cluster: int) -> None:
        """Leave no room for a cluster's next checkpoint, and then for the one after it."""
        assert self._run.disks is not None, "a run that is to suffer it has disks"
        disks, own = self._run.disks, [t for (c, _), t in self._run.tails.items() if c == cluster]

        def has_come(what: str, since: Sequence[int]) -> bool:
            return all(
                any(record["what"] == what for record in tail.records[begin:])
                for tail, begin in zip(own, since, strict=True)
            )

        def has_failed() -> bool:
            disks.fill(cluster)  # what was being written may have gone
            return has_come("not_saved", since)

        since = [len(tail.records) for tail in own]
        try:
            self._run.until(has_failed, f"cluster {cluster}: no save fails")
        finally:
            disks.free(cluster)
        since = [len(tail.records) for tail in own]
        self._run.until(
            lambda: has_come("saved", since),
            f"cluster {cluster}: none succeeds",
        )

    def _pause(self, cluster: int, seconds: float) -> None:
        own = [pid for pid, (c, _) in self._run.pids.items() if c == cluster]
        try:
            for pid in own:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            for pid in own:
                os.kill(pid, signal.SIGCONT)

    def _has_launched(self, cluster: int, step: int) -> bool:
        launch = last(self._run.tails[cluster, 0].records, "launch")
        return launch is not None and launch["step"] >= step

    def _all_have(self, cluster: int, *what: str) -> bool:
        return all(tail.has(*what) for (c, _), tail in self._run.tails.items() if c == cluster)

    def _pid_of(self, cluster: int, rank: int) -> int:
        return next(pid for pid, of in self._run.pids.items() if of == (cluster, rank))
