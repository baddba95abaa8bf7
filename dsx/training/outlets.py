"""Where others see a run while it goes on: figures for Prometheus, notices, spans; on rank 0 alone.

Each is told of the same things, and none of them holds training up or ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.comm.address import page_address
from dsx.comm.versions import own_versions
from dsx.comm.world import World
from dsx.config.schema import DsxConfig
from dsx.core.membership import Membership
from dsx.method.alarms import BOUNDS
from dsx.telemetry.behind import Behind
from dsx.telemetry.exporters.otlp import Spans
from dsx.telemetry.figures import Figures
from dsx.telemetry.measured_rates import MeasuredRates, Way, read_measured_rates
from dsx.telemetry.progress import Progress
from dsx.telemetry.prometheus import Page
from dsx.training.telling import Telling


class Outlets:
    """One rank's; every method is a no-op where nothing is asked for, or another rank tells."""

    def __init__(self, config: DsxConfig, world: World, progress: Progress, behind: Behind) -> None:
        self._config, self._world, self._progress = config, world, progress
        self._figures = _figures(config, world, progress, behind)
        self._page: Page | None = None
        self._telling: Telling | None = None
        self._spans: Spans | None = None
        self.measured: MeasuredRates | None = None  # of the line, where somebody has

    def open(self) -> str:
        """Open what is asked for; return why that cannot be, for all clusters to hear."""
        metrics, world = self._config.metrics, self._world
        if world.rank:
            return ""
        try:
            if metrics.net_test is not None:
                way = _way_of(self._config, world)
                path, streams = Path(metrics.net_test), self._config.link.streams
                self.measured = read_measured_rates(path, world.cluster_id, way, streams)
            if metrics.otlp is not None:
                self._spans = Spans(
                    metrics.otlp, world.cluster_id, world.session, self._config.preset
                )
            if metrics.notices:
                self._telling = Telling(self._config, world, self._progress)
            if metrics.prometheus is not None:
                self._page = Page(*page_address(metrics.prometheus), self._figures)
        except (OSError, ModuleNotFoundError, ValueError) as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Let go of ports, and send what is on its way."""
        if self._page is not None:
            self._page.close()
        if self._telling is not None:
            self._telling.close()
        if self._spans is not None:
            self._spans.close()

    def begin(self, step: int, skipped_steps: int, folder: Path | None) -> None:
        """Go on from a step, in the run's folder, if it has one."""
        self._figures.begin(step, skipped_steps, folder)
        if self._telling is not None:
            self._telling.begin(step, folder)
        if self._spans is not None:
            self._spans.begin(step)

    def step(self, record: Mapping[str, Any], membership: Membership) -> None:
        """Take the record of a step, and who trains by then."""
        self._figures.step(record, membership.ids)
        if self._telling is not None:
            self._telling.step(record["step"], membership)
        if self._spans is not None:
            self._spans.step(record["step"])

    def sync(self, record: Mapping[str, Any]) -> None:
        """Take the record of a sync, of the whole cluster."""
        self._figures.sync(record)
        if self._telling is not None:
            self._telling.sync(record)
        if self._spans is not None:
            self._spans.sync(record)

    def machine(self, record: Mapping[str, Any]) -> None:
        """Take what the process holds, and what its links are like; from any thread."""
        self._figures.machine(record)

    def saving(self) -> None:
        """Take that a checkpoint is begun."""
        if self._spans is not None:
            self._spans.saving()

    def saved(self, path: Path, step: int) -> None:
        """Take that it is complete."""
        self._figures.saved(path, step)
        if self._spans is not None:
            self._spans.saved(str(path), step)

    def not_saved(self, why: str) -> None:
        """Take that it could not be written."""
        if self._telling is not None:
            self._telling.not_saved(why)

    def copied(self, step: int) -> None:
        """Take that one is complete at a remote place, too."""
        self._figures.copied(step)

    def not_copied(self, why: str) -> None:
        """Take that it could not be copied there."""
        if self._telling is not None:
            self._telling.not_copied(why)

    def healed(self, seconds: float, num_bytes: int, step: int) -> None:
        """Take that this cluster has come to the others, by so many bytes of theirs."""
        if self._spans is not None:
            self._spans.healed(seconds, num_bytes, step)

    def rolled_back(self, why: str, step: int) -> None:
        """Take that training goes back, from a step."""
        self._figures.rolled_back()
        if self._telling is not None:
            self._telling.rolled_back(why, step)

    def waits(self, step: int, gone: tuple[int, ...], seconds: float) -> None:
        """Take that training stands still until others are back."""
        if self._telling is not None:
            self._telling.waits(step, gone, seconds)

    def end(self, step: int, how: str, is_own: bool) -> None:
        """Take how training ended; `is_own`: this cluster's part alone."""
        if self._telling is not None:
            self._telling.end(step, how, is_own)


def _way_of(config: DsxConfig, world: World) -> Way:
    transport = "gloo" if world.link is None else "link"
    return Way(world.num_clusters, transport, config.link.security or "none")


def _figures(config: DsxConfig, world: World, progress: Progress, behind: Behind) -> Figures:
    """Return what this rank's page shows; it keeps nothing where there is none."""

    def line_limit() -> float | None:
        rate = None if world.link is None else world.link.bytes_per_second
        return None if rate is None else rate * world.world_size

    figures = Figures(
        world.cluster_id,
        world.num_clusters,
        config.metrics.prometheus is not None and world.rank == 0,
        sorted({bound.kind for bound in BOUNDS}),
        {
            "dsx_loss": lambda: progress.loss,
            "dsx_tokens_total": lambda: progress.tokens,
            "dsx_planned_steps": lambda: progress.total_steps,
            "dsx_line_limit_bytes_per_second": line_limit,
            "dsx_missing_records": lambda: sum(behind.missing.by_file().values()),
        },
        behind,
    )
    figures.started(config.preset, own_versions()["dsx"])
    return figures
