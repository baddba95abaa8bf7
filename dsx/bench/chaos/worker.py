"""One rank of one cluster: trains with an engine, and writes down what it does as it does it.

A line is written by one call, and stands whatever happens to the process behind it. What is written
are steps (with the numbers of the samples), launches and commits (with a hash of the anchor), and
the end. The engine (engines/) is the only thing that differs from one run to another.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from dsx.bench.chaos.engines.engine import digest, module_of
from dsx.bench.chaos.job import Job, checkpoints_path, log_path, orders_path
from dsx.bench.chaos.saves import Saves, steps_of_ends
from dsx.bench.chaos.spoiling import SPOILING, Spoiler
from dsx.bench.worker_files import Orders, RankLog
from dsx.comm.world import current_world
from dsx.training.handle import Handle


class Watch:
    """Tells the log what has been launched, committed and refused since the step before."""

    def __init__(self, handle: Handle, log: RankLog) -> None:
        self._loop, self._log = handle.loop, log
        history = self._loop.history
        self._launches, self._rounds = list(history.launches), list(history.rounds)
        self._applied = dict.fromkeys(range(history.num_fragments), 0)
        self._applied |= {f: transfer.launched for f, transfer in self._loop.last_applied.items()}
        stage = self._loop.adapter.stage
        log.write("fragments", count=history.num_fragments, stage=[stage.index, stage.count])

    def look(self, is_spoilt: bool = False) -> bool:
        """Write what is new: at most one of each fragment, as a period has more than one step.

        Returns whether anything has been launched; `is_spoilt` says that it is wrong on purpose.
        """
        history, has_launched = self._loop.history, False
        for fragment, launches in enumerate(history.launches):
            if self._launches[fragment] < launches:
                self._launches[fragment], has_launched = launches, True
                self._log.write("launch", fragment=fragment, step=history.launched[fragment],
                                is_spoilt=is_spoilt)  # fmt: skip
        for fragment, transfer in self._loop.last_applied.items():
            if self._applied[fragment] == transfer.launched:
                continue
            self._applied[fragment] = transfer.launched
            was_taken = self._rounds[fragment] < history.rounds[fragment]
            self._rounds[fragment] = history.rounds[fragment]
            parity = transfer.buffers.parity
            self._log.write(
                "commit" if was_taken else "refused", fragment=fragment, step=transfer.launched,
                members=list(parity.ids), by=list(parity.refused_by), hash=self._hash(fragment),
            )  # fmt: skip
        return has_launched

    def _hash(self, fragment: int) -> str:
        return digest([self._loop.state.anchor[fragment]])


class FaultOrders(Orders):
    """Orders, some of which are faults of this rank's own."""

    def __init__(self, path: Path, last_step: int) -> None:
        super().__init__(path, last_step=last_step)
        self._clock_moved = 0.0
        self._spoilt = dict.fromkeys(SPOILING, 0)  # the last order that was carried out

    def look(self) -> None:
        """Take what is new, and move the clock if that is wanted."""
        super().look()
        by = float(self.given.get("clock", 0.0))
        if by != self._clock_moved:
            _move_clock(by - self._clock_moved)
            self._clock_moved = by

    def spoils(self, step: int) -> float | None:
        """Return what this step's contribution is to be multiplied by, if it is to be wrong.

        From the step of an order on, up to the next launch.
        """
        for kind, factor in SPOILING.items():
            if self._spoilt[kind] < self.given.get(kind, 0) <= step:
                return factor
        return None

    def has_launched(self, step: int) -> None:
        """Note that something has been launched: what was to be spoilt, was."""
        for kind in SPOILING:
            if self.given.get(kind, 0) <= step:
                self._spoilt[kind] = self.given.get(kind, 0)


def leader_of_log() -> int | None:
    """Return who leads the log, as far as this rank knows: the first one of a cluster does."""
    world = current_world()
    clerk = None if world is None else world.clerk
    return None if clerk is None else clerk.facts()["coordinator"]


def _move_clock(by: float) -> None:
    """Let this process see another time of day."""
    now = time.time
    time.time = lambda: now() + by


def train(job: Job, cluster: int, rank: int) -> None:
    """Train until the last step; what ends it before is in the log, too."""
    directory = Path(job.directory)
    log = RankLog(log_path(directory, cluster, rank))
    log.write("begin", cluster=cluster, rank=rank, pid=os.getpid())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    try:
        _train(job, cluster, rank, log)
    except SystemExit as end:
        if end.code:
            log.write("failed", why=f"SystemExit: {end.code}")
        else:  # told to leave
            log.write("left", saved=steps_of_ends(checkpoints_path(directory, cluster)))
        raise
    except BaseException as error:
        log.write("failed", why=f"{type(error).__name__}: {error}")
        raise


def _train(job: Job, cluster: int, rank: int, log: RankLog) -> None:
    engine = module_of(job.engine).build(job, cluster, rank)
    handle = engine.handle
    handle.settle()  # where the others train already, it is behind this that it is one of them
    watch, spoiler = Watch(handle, log), Spoiler(handle.loop, engine.masters)
    directory, took = Path(job.directory), 0.0  # since the step before
    orders = FaultOrders(orders_path(directory, cluster), job.last_step)
    saves = Saves(engine.save, checkpoints_path(directory, cluster), rank == 0, log)
    while handle.step < orders.given["last_step"]:
        step, began = handle.step + 1, time.perf_counter()
        spoiler.factor = orders.spoils(step)
        samples, loss = engine.step()
        seconds = time.perf_counter() - began + took
        log.write("step", step=step, seconds=seconds, samples=samples, loss=loss,
                  members=list(handle.members), leader=leader_of_log())  # fmt: skip
        if watch.look(spoiler.factor is not None):
            orders.has_launched(step)
        saves.save_if_due(step)
        orders.look()
        stopped = time.perf_counter()
        handle.should_stop()
        took = time.perf_counter() - stopped
        time.sleep(max(0.0, job.step_seconds - (time.perf_counter() - began)))
    spoiler.factor = None
    handle.finish()
    watch.look()
    history = handle.loop.history
    with handle.averaged():
        loss, weights = engine.evaluate(), engine.weights_hash()
    log.write(
        "end", step=history.step, loss=loss, launches=list(history.launches),
        rounds=list(history.rounds), members=list(handle.members), hash=weights,
    )  # fmt: skip
    handle.close()
