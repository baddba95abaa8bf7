"""Rows of a table as real processes on throttled lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsx.bench.convergence.task import BASELINE, merge
from dsx.bench.e2e.bench import Bench, Options, open_runner
from dsx.bench.e2e.bench import Row as LineRow
from dsx.bench.e2e.job import Shape
from dsx.bench.e2e.plan import Plan, Situation, plan_preset, planned_interval
from dsx.bench.paper.table import Row, Samples

if TYPE_CHECKING:
    from dsx.bench.paper.measure import Lines


def measure_lines(
    lines: Lines, rows: Sequence[Row], data: Path, out: Path, num_blocks: int
) -> Samples:
    """Return a sample per block; TestbedUnavailable, RunFailed and ValueError as `bench e2e`."""
    shape = Shape.parse(lines.shape)
    options = Options(
        out, data, lines.num_clusters, (lines.ratio,), (), lines.rounds, num_blocks, lines.margin,
        shape,
        latency_milliseconds=lines.latency_milliseconds,
    )  # fmt: skip
    with open_runner(options, lines.shares_cores) as runner:
        bench = Bench(options, lines.ratio, runner, lambda line: typer.echo(line, err=True))
        situation = bench.situation_to_plan()
        planned = planned_interval(situation, lines.margin)
        plans = {
            row.label: plan_row(row, situation, lines.margin, planned)
            for row in rows
            if row.preset != BASELINE
        }
        line, ceiling, synchronous = bench.references(bench.steps_of(planned))
        measured = {
            label: bench.preset(plan, line, bench.steps_of(plan.interval))
            for label, plan in plans.items()
        }
    samples: Samples = {}
    for row in rows:
        own = measured.get(row.label, synchronous)
        shares = own.block_utilizations or (own.utilization,) * num_blocks
        samples[row.label] = _figures(own, shares, ceiling, synchronous) | overlaps_of(own)
    return samples


def plan_row(row: Row, situation: Situation, margin: float, planned: int | None = None) -> Plan:
    """Return the preset of `bench e2e`, with the row's overrides before its choices.

    `planned` is the H of rows that do not say theirs; None: the planner's.
    """
    interval = row.overrides.get("schedule", {}).get("interval", planned)
    interval = interval or planned_interval(situation, margin)
    usual = plan_preset(row.preset, interval, situation, margin)
    choices = merge({k: v for k, v in usual.block.items() if k != "preset"}, row.overrides)
    return plan_preset(row.preset, interval, situation, margin, choices)


def _figures(
    own: LineRow, shares: Sequence[float], ceiling: LineRow, synchronous: LineRow
) -> dict[str, list[float]]:
    """Return every figure per block; speeds are of the ceiling beside it, which does not drift."""
    ideal = ceiling.speedup
    whole = {
        "payload_bytes": float(own.payload_bytes or own.wire_bytes),
        "wire_bytes": float(own.wire_bytes),
        "loss": own.validation_loss,
        "interval": float(own.interval),
    }
    return {
        "utilization": list(shares),
        "speedup": [share * ideal for share in shares],
        "tokens_per_second": [share * ideal * synchronous.tokens_per_second for share in shares],
        **{figure: [value] * len(shares) for figure, value in whole.items()},
    }


def overlaps_of(own: LineRow) -> dict[str, list[float]]:
    """Return the share of transfers that is hidden, as measured and as CO2 computes it."""
    if not (own.block_overlaps and own.transfer_seconds):
        return {}
    computed = min(1.0, own.interval * own.ceiling_seconds / own.transfer_seconds)
    count = len(own.block_overlaps)
    return {
        "overlap": list(own.block_overlaps),
        "computed_overlap": [computed] * count,
        "step_seconds": [own.ceiling_seconds] * count,
        "transfer_seconds": [own.transfer_seconds] * count,
    }
