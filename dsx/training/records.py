"""What one rank writes of its run, and the clock of its steps.

Rank 0 of a cluster writes the metrics, run.json and the log into the run's folder (see
telemetry/run_folder.py), every rank its own spans where a trace is asked for. Nothing is written
before the first step, as only then is it known whether the run goes on from a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.checkpoint.tags import complete_tags
from dsx.comm.world import World
from dsx.config.schema import DsxConfig
from dsx.core.engine import EngineAdapter
from dsx.outer.transfer import Totals
from dsx.telemetry.metrics import Metrics
from dsx.telemetry.run_file import Origin, RunFile
from dsx.training.start import files_of_run, start_facts, start_record, start_trace


class Records:
    """One rank's records; no-ops where the run has no folder, or another rank writes."""

    def __init__(self, config: DsxConfig, world: World, adapter: EngineAdapter) -> None:
        named = config.metrics.dir if world.rank == 0 else None
        directory = None if named is None else Path(named)
        cluster = world.cluster_id
        self.trace = start_trace(config.metrics, world, adapter)
        self._metrics = Metrics(directory, cluster, config.metrics.tensorboard)
        self._run = RunFile(
            directory,
            cluster,
            files_of_run(config, cluster),
            start_facts(adapter, world, config),
        )
        self._first_record = lambda: start_record(adapter, world, config)
        self._has_begun = False

    def begin(self, step: int, totals: Totals, origin: Path | None = None) -> None:
        """Go on from `step`, and from a checkpoint if there is one."""
        continues = self._run.begin(step, None if origin is None else _origin(origin))
        self._metrics.begin(step if continues else 0)
        self.trace.begin(step)
        self._passed = time.perf_counter()
        self._blocked = totals.blocked_seconds

    def pass_boundary(self, step: int, totals: Totals, bytes_sent: int) -> None:
        """Write the step before, and hold the record of this one."""
        self._run.confirm()
        if not self._has_begun:
            self._metrics.event("start", self._first_record())
            self._has_begun = True
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
        }
        self._metrics.step(record)
        self.trace.end_step(step)

    def complete_step(self, fields: Mapping[str, Any]) -> None:
        """Add the script's own numbers to the step just taken."""
        self._metrics.complete_step(fields)

    def sync(self, record: Mapping[str, Any]) -> None:
        """Write the record of a sync."""
        self._metrics.event("sync", record)

    def log(self, kind: str, record: Mapping[str, Any]) -> None:
        """Write a record of the script's own, behind that of the step just taken."""
        self._metrics.flush()
        self._metrics.event(kind, record)

    def saved(self, path: Path, step: int) -> None:
        """Enter a checkpoint that is complete."""
        self._run.saved(path, step)

    def end(self, step: int, how: str) -> None:
        """Enter how the run ended, and write what there is."""
        self._metrics.flush()
        self.trace.flush()
        self._run.end(step, how)
        self._run.flush()

    def close(self) -> None:
        """Write what there is and close the files."""
        self._metrics.close()
        self.trace.close()
        self._run.close()


def _origin(path: Path) -> Origin:
    manifest = complete_tags(path.parent).get(path.name, {})
    return Origin(path, manifest.get("session"))
