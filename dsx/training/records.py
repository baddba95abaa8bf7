"""What one rank writes of its run, and the clock of its steps.

Rank 0 of a cluster writes the metrics, run.json and the log into the run's folder (see
telemetry/run_folder.py), every rank its own spans where a trace is asked for. Nothing is written
before the first step, as only then is it known whether the run goes on from a checkpoint, and so
in which folder (telemetry/folder_choice.py); what is logged before is held until then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsx.checkpoint.files import SavedRank, rank_file
from dsx.comm.world import World
from dsx.config.schema import DsxConfig
from dsx.core.engine import EngineAdapter
from dsx.core.membership import Membership
from dsx.core.units import format_bytes
from dsx.core.waits import NextWait
from dsx.outer.loop import OuterLoop
from dsx.outer.memory import OuterMemory
from dsx.outer.transfer import Totals
from dsx.telemetry.behind import Behind
from dsx.telemetry.folder_choice import FolderChoice, Origin, look
from dsx.telemetry.measured_rates import MeasuredRates
from dsx.telemetry.metrics import Metrics, metrics_path
from dsx.telemetry.progress import Progress
from dsx.telemetry.run_file import RunFile
from dsx.telemetry.stalls import stall_watch
from dsx.telemetry.sync_records import SyncRecords
from dsx.telemetry.trace.parts import trace_path
from dsx.training.advice import Advice
from dsx.training.machine import Machine
from dsx.training.outlets import Outlets
from dsx.training.start import files_of_run, start_facts, start_record, start_trace
from dsx.training.under_way import UnderWay

logger = logging.getLogger(__name__)


class Records:
    """One rank's records; no-ops where the run has no folder, or another rank writes.

    Creating it is collective over all ranks of all clusters, which agree on the folder.
    """

    def __init__(self, config: DsxConfig, world: World, adapter: EngineAdapter) -> None:
        cluster, metrics = world.cluster_id, config.metrics
        self._is_shown = metrics.prometheus is not None or metrics.dir is not None
        self._place = cluster, world.rank
        self._members = world.seat.ids  # as the records have them
        self._writes = world.rank == 0
        self._behind = Behind()
        speaks = self._writes and not (world.has_one_launcher and cluster)
        senders = adapter.ranks.shard[1] * adapter.stage.count
        seconds, is_shown = config.metrics.progress_seconds, config.metrics.reads_losses
        self.progress = Progress(cluster, seconds, speaks, senders, self._writes and is_shown)
        self._outlets = Outlets(config, world, self.progress, self._behind)
        try:
            self._choice = _choose(config, world, self._outlets.open())
        except Exception:
            self._outlets.close()
            raise
        self.trace = start_trace(config.metrics, world, adapter, self._behind)
        to = config.metrics.to if self._writes else ()
        self._metrics = Metrics(cluster, to, self._behind)
        self._run = RunFile(
            self._writes and self.folder is not None,
            cluster,
            files_of_run(config, cluster),
            start_facts(adapter, world, config),
            self._behind,
        )
        self._advice = Advice(config, adapter.inner_lr, lambda: self.progress.total_steps, speaks)
        self._early: list[tuple[str, Mapping[str, Any]]] = []  # what was logged before a step
        self._planned: int | None = None  # steps of the run, as the records have it
        self._first_record: Any = lambda: start_record(adapter, world, config)
        self._under_way: UnderWay | None = None
        self._machine: Machine | None = None
        self._origin: Origin | None = None
        self._is_confirmed = False
        self._next_step = NextWait()  # so that a rank which hangs in the engine reports itself
        self._deadline_seconds = world.deadline_seconds

    def follow(
        self, loop: OuterLoop, syncs: SyncRecords, memory: OuterMemory, world: World
    ) -> None:
        """Record what becomes of transfers, and what the process holds against its plan."""
        self._under_way = UnderWay(loop, syncs.launched)
        if self._writes and self._is_shown:
            self._machine = Machine(world, loop, memory.total, self._outlets.measured)
        syncs.write_launch = self._launched
        first = self._first_record
        planned = {name: size for name, size in vars(memory).items() if size}
        more = loop.beginning.record
        cores = loop.state.resources.cores
        told = {} if cores is None else {"coding_cores": cores.cores}
        self._first_record = lambda: {**first(), "outer_memory": planned, **told, **more()}

    @property
    def measured(self) -> MeasuredRates | None:
        """What the line gave when it was measured, where somebody has; on the first rank alone."""
        return self._outlets.measured

    @property
    def folder(self) -> Path | None:
        """The run's folder, as far as is known: a checkpoint that is loaded may name another."""
        return self._choice.folder

    def begin(self, step: int, totals: Totals, checkpoint: Path | None = None) -> None:
        """Go on from `step`, and from a checkpoint if there is one."""
        self._origin = None if checkpoint is None else _origin(checkpoint)
        self._choice.begin(self._origin)
        own = self.folder if self._writes else None
        self._run.begin(own, step, self._origin, self._choice.continues)
        self._metrics.begin(own, step)
        if self.folder is not None:
            self.trace.begin(step, trace_path(self.folder, *self._place))
        self._passed = time.perf_counter()
        self._blocked = totals.blocked_seconds
        self._is_confirmed = False
        if self._under_way is not None:
            self._under_way.begin()
        self.progress.begin(step)
        self._outlets.begin(step, totals.skipped_steps, own)
        self._advice.begin(step)
        self._await_step(step)

    def confirm(self) -> None:
        """Take the folder: a step has been taken, or training ends. Later calls undo an end."""
        why = "" if self._is_confirmed else self._choice.claim(self._origin, self._writes)
        if why:
            logger.warning("%s", why)
        self._run.confirm()
        self.trace.confirm()
        if self._is_confirmed:
            return
        self._is_confirmed = True
        if self.folder is not None:
            stall_watch().write_to(self.folder, *self._place)
        if self._first_record is not None:
            self._metrics.event("start", self._first_record())
            self._first_record = None
        self._write_early()

    def pass_boundary(
        self, step: int, totals: Totals, bytes_sent: int, membership: Membership
    ) -> None:
        """Write the step before, and hold the record of this one; `membership`: who trains now."""
        self.confirm()
        members = membership.ids
        if members != self._members:
            self._members = members
            self._event("members", {"step": step, "members": [*members]})
        if self.progress.total_steps != self._planned:
            self._planned = self.progress.total_steps
            self._event("planned", {"step": step, "planned_steps": self._planned})
        now, blocked = time.perf_counter(), totals.blocked_seconds
        seconds, blocked_seconds = now - self._passed, blocked - self._blocked
        self._passed, self._blocked = now, blocked
        record = {
            "step": step,
            "seconds": seconds,
            "blocked_seconds": blocked_seconds,
            "utilization": 1 - blocked_seconds / seconds,
            "bytes_sent": bytes_sent,
            "skipped_steps": totals.skipped_steps,
            **(self._under_way.pass_boundary() if self._under_way is not None else {}),
        }
        self._metrics.step(record)
        self._outlets.step(record, membership)
        self._look_at_machine(step)
        self.progress.last_step = record
        self.progress.pass_boundary(step, blocked_seconds)
        self._advice.pass_boundary()
        self.trace.end_step(step)
        self._await_step(step)

    def complete_step(self, fields: Mapping[str, Any]) -> None:
        """Add the script's own numbers to the step just taken."""
        self.progress.note(fields)
        self._metrics.complete_step(fields)

    def sync(self, record: Mapping[str, Any]) -> None:
        """Write the record of a sync."""
        self._event("sync", record)
        self._outlets.sync(record)

    def _launched(self, record: Mapping[str, Any]) -> None:
        """Write that a transfer is under way; of the first one of a start it is not known yet."""
        if self._is_confirmed:
            self._metrics.flush()
            self._event("launch", record)

    def log(self, kind: str, record: Mapping[str, Any]) -> None:
        """Write a record of the script's own, behind that of the step just taken."""
        self._metrics.flush()
        self._event(kind, record)

    def order(self, record: Mapping[str, Any]) -> None:
        """Write the record of an order that all clusters follow."""
        self._event("order", record)

    def saving(self) -> None:
        """Take that a checkpoint is begun."""
        self._outlets.saving()

    def healed(
        self, step: int, seconds: float, copied_bytes: int, held_bytes: int, results_bytes: int
    ) -> None:
        """Take that this cluster has come to the others: by a copy, but for what it held, and by
        their results since.
        """
        record = {"step": step, "seconds": seconds, "copied_bytes": copied_bytes}
        self._event("healed", {**record, "held_bytes": held_bytes, "results_bytes": results_bytes})
        self._outlets.healed(seconds, copied_bytes, step)

    def saved(self, path: Path, step: int) -> None:
        """Enter a checkpoint that is complete."""
        self._run.saved(path, step)
        self._outlets.saved(path, step)

    def not_saved(self, path: Path, step: int, why: str) -> None:
        """Tell of a checkpoint that could not be written, once for its cluster."""
        if self._writes:
            logger.error("%s", why)
        self._event("not_saved", {"step": step, "path": str(path), "why": why})
        self._outlets.not_saved(why)

    def copied(self, path: Path, step: int, url: str, num_bytes: int, seconds: float) -> None:
        """Enter that a checkpoint is complete at a remote place, too."""
        logger.info("%s is at %s: %s in %.1f s", path, url, format_bytes(num_bytes), seconds)
        record = {"step": step, "path": str(path), "url": url}
        self._event("copied", {**record, "bytes": num_bytes, "seconds": seconds})
        self._run.copied(path, url)
        self._outlets.copied(step)

    def not_copied(self, path: Path, step: int, url: str, why: str) -> None:
        """Tell of a checkpoint that could not be copied there, once for its cluster."""
        told = f"{path} is not copied to {url}: {why}; training goes on, and the next one is tried"
        logger.warning("%s", told)
        self._event("not_copied", {"step": step, "path": str(path), "url": url, "why": why})
        self._outlets.not_copied(told)

    def rolled_back(self, why: str, step: int) -> None:
        """Enter that this start is one of training that went back, from a step."""
        self._run.rolled_back(why, step)
        self._outlets.rolled_back(why, step)

    def deleted(self, path: Path) -> None:
        """Take a checkpoint out that is there no more."""
        self._run.deleted(path)

    def end(self, step: int, how: str, is_own: bool = False) -> None:
        """Enter how the run ended, and write what there is; `is_own`: the others may go on."""
        self._next_step.end()
        self._outlets.end(step, how, is_own)
        if how == "finished":
            self._advice.end(step)
        self._metrics.flush()
        self.trace.flush()
        self._behind.flush()
        self._run.end(step, how)
        self._behind.missing.tell()
        self._behind.flush()

    def close(self) -> None:
        """Write what there is and close the files."""
        self._next_step.end()
        if self._early and self._writes:  # no step was taken: nothing that is there is dropped
            self._metrics.begin(self.folder, None)
            self._write_early()
        self._metrics.close()
        self.trace.close()
        self._run.close()
        self._outlets.close()
        if self.folder is not None:
            stall_watch().leave(self.folder, *self._place)

    @contextmanager
    def standing_still(self, step: int, gone: tuple[int, ...], seconds: float) -> Generator[None]:
        """Wait inside for no step: training stands still behind this one, and is to.

        `gone` are the clusters that are waited for, so many `seconds` at most.
        """
        self._next_step.end()
        self._outlets.waits(step, gone, seconds)
        yield
        self._await_step(step)

    def _look_at_machine(self, step: int) -> None:
        """Have it looked what the process holds, where it is time; another thread does."""
        machine = self._machine
        if machine is None or not machine.is_due():
            return
        write = self._metrics.writer("machine")

        def look() -> None:
            record = {"step": step, **machine.read()}
            self._outlets.machine(record)
            write(record)

        self._behind.do(look, metrics_path(self.folder or Path(), self._place[0]))

    def _await_step(self, step: int) -> None:
        self._next_step.begin(f"the end of inner step {step + 1}", self._deadline_seconds)

    def _event(self, kind: str, record: Mapping[str, Any]) -> None:
        if self._is_confirmed:
            self._metrics.event(kind, record)
        elif self._writes and self.folder is not None:
            self._early.append((kind, record))

    def _write_early(self) -> None:
        early, self._early = self._early, []
        for kind, record in early:
            self._metrics.event(kind, record)


def _choose(config: DsxConfig, world: World, trouble: str) -> FolderChoice:
    """Let all clusters tell what they have in folders of the run's name. Collective over all.

    ValueError where the folder of one cannot be read, or it has another `trouble`.
    """
    base = None if config.metrics.dir is None else Path(config.metrics.dir)
    joins = None if world.joins is None else world.session
    found: Any = trouble or {}
    if base is not None and world.rank == 0 and not trouble:
        try:
            found = look(base, world.cluster_id, joins)
        except (OSError, ValueError) as error:
            found = str(error)
    if joins is not None:  # the others have told all before, so no rank hears of this one's first
        found = world.in_cluster().from_first("the run's folder", found)
    everyone = world.rendezvous.gather("the run's folder", found)
    for cluster, one in enumerate(everyone):
        if isinstance(one, str):
            raise ValueError(f"cluster {cluster}: {one}")
    return FolderChoice(base, world.cluster_id, world.session, everyone, joins is not None)


def _origin(checkpoint: Path) -> Origin:
    return Origin(checkpoint, SavedRank(rank_file(checkpoint, 0)).meta["session"])
