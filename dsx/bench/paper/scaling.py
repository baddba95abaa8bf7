"""Speed by the number of clusters on one kind of line: measured for a few, predicted for more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsx.bench.convergence.task import BASELINE
from dsx.bench.paper.measure import Lines, Minutes
from dsx.bench.paper.table import Row, Run, Samples

if TYPE_CHECKING:
    from dsx.bench.e2e.plan import Situation


@dataclass(frozen=True)
class Scaling:
    """Weak scaling: every cluster has a batch of its own, and a line as fast as the others'.

    Figures: `at_C`, the speed of C clusters in units of one that nobody waits for; and
    `scalability`, that of the most clusters over that of the fewest, each by its number. `lines`
    says how those of `measured` (of `short_measured`) are run, with as many of `num_clusters` at a
    time; those of `predicted` that are not measured are what the planner says. The line is as fast
    as makes an all-reduce among the most clusters take `ratio` times a step.
    """

    lines: Lines
    measured: tuple[int, ...]
    short_measured: tuple[int, ...]
    predicted: tuple[int, ...]
    kind = "line, simulation"

    @property
    def full_and_short_minutes(self) -> Minutes:
        """Return what `lines` says of all its runs."""
        return self.lines.full_and_short_minutes

    def minutes(self, rows: Sequence[Row], run: Run) -> float:
        """Return the declared minutes."""
        return self.lines.minutes(rows, run)

    def ratio_at(self, num_clusters: int) -> float:
        """Return an all-reduce's seconds over a step's, for C clusters on the same line."""
        most = max(self.predicted)
        return self.lines.ratio * _share_sent(num_clusters) / _share_sent(most)

    def measure(self, rows: Sequence[Row], run: Run) -> Samples:
        """Run, predict, and put the speeds side by side; errors as of `dsx bench e2e`."""
        samples: Samples = {row.label: {} for row in rows}
        measured = self.short_measured if run.short else self.measured
        for clusters in sorted({*measured, *self.predicted}):
            if clusters in measured:
                ratio = self.ratio_at(clusters)
                lines = replace(self.lines, ratio=ratio, num_clusters=clusters)
                kept = run.kept.with_suffix(f".{clusters}")
                found = lines.measure(rows, replace(run, kept=kept))
                shares = {label: figures["utilization"] for label, figures in found.items()}
            else:
                count = self.lines.short_blocks if run.short else self.lines.blocks
                shares = {row.label: [self.predict(row, clusters)] * count for row in rows}
            for label, values in shares.items():
                samples[label][f"at_{clusters}"] = [clusters * share for share in values]
        fewest, most = min(measured), max(self.predicted)
        for figures in samples.values():
            pairs = zip(figures[f"at_{fewest}"], figures[f"at_{most}"], strict=True)
            figures["scalability"] = [last * fewest / (first * most) for first, last in pairs]
        return samples

    def predict(self, row: Row, num_clusters: int) -> float:
        """Return the share of the time that the planner says is computed."""
        from dsx.bench.paper.lines import plan_row
        from dsx.plan.predict import data_parallel

        situation = self._situation(num_clusters)
        if row.preset == BASELINE:
            sizes = [sum(math.prod(p.shape) for p in situation.parameters)]
            return data_parallel(sizes, num_clusters, 1.0, situation.link).utilization
        return plan_row(row, situation, self.lines.margin).predict(situation).utilization

    def _situation(self, num_clusters: int) -> Situation:
        from dsx.bench.e2e.job import Shape, build_model
        from dsx.bench.e2e.plan import Situation
        from dsx.core.types import ParameterShape
        from dsx.plan.link import Link, wire_bytes

        named = build_model(Shape.parse(self.lines.shape), 0).named_parameters()
        parameters = [ParameterShape(name, tuple(p.shape)) for name, p in named]
        numel = sum(math.prod(p.shape) for p in parameters)
        sent = wire_bytes(4 * _share_sent(num_clusters) * numel)
        return Situation(
            parameters, 1.0, Link(8 * sent / self.ratio_at(num_clusters)), num_clusters
        )


def _share_sent(num_clusters: int) -> float:
    """Return what an all-reduce sends, in sizes of the model."""
    return 2 * (num_clusters - 1) / num_clusters
