"""A measured table: ours beside published, the verdicts, JSON and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from dsx.bench.paper.table import Column, Samples, Table
from dsx.bench.paper.verdict import Verdict, judge


def verdicts(table: Table, samples: Samples) -> list[Verdict]:
    """Return a verdict per claim."""
    headings = {column.figure: column.heading for column in table.columns}
    return [judge(claim, samples, headings[claim.figure]) for claim in table.claims]


def show(table: Table, samples: Samples, console: Console) -> None:
    """Print a line per row, in the paper's order, and a sentence per claim."""
    grid = RichTable()
    grid.add_column("")
    published = {figure for row in table.rows for figure in row.published}
    for column in table.columns:
        grid.add_column(column.heading, justify="right")
        if column.figure in published:
            grid.add_column("published", justify="right", style="dim")
    for row in table.rows:
        cells = [row.label]
        for column in table.columns:
            cells.append(shown(column, samples[row.label].get(column.figure, ())))
            if column.figure in published:
                value = row.published.get(column.figure)
                cells.append("" if value is None else column.format.format(value))
        grid.add_row(*cells)
    title = f"{table.name}: {table.title} ({table.where})"
    console.print(title, highlight=False, soft_wrap=True)
    console.print(grid)
    if any(len(v) > 1 for figures in samples.values() for v in figures.values()):
        console.print("+-: standard deviation", highlight=False)
    for text in (table.note, *(verdict.sentence for verdict in verdicts(table, samples))):
        if text:
            console.print(text, highlight=False, soft_wrap=True)


def shown(column: Column, values: Sequence[float]) -> str:
    """Return the mean, and the standard deviation where values differ; "-" for none."""
    if not values:
        return "-"
    if not all(map(math.isfinite, values)):
        return "-" if column.figure.endswith("_to_target") else "diverged"
    text = column.format.format(fmean(values))
    spread = stdev(values) if len(values) > 1 else 0.0
    return f"{text} +- {column.format.format(spread)}" if spread else text


def as_json(table: Table, samples: Samples, short: bool) -> dict[str, Any]:
    """Return plain values: rows with every figure's samples beside published, and verdicts."""
    rows = [
        {
            "label": row.label,
            "preset": row.preset,
            "overrides": row.overrides,
            "study": row.study,
            "published": row.published,
            "samples": {
                figure: [value if math.isfinite(value) else None for value in values]
                for figure, values in samples[row.label].items()
            },
        }
        for row in table.rows
    ]
    found = [
        {"claim": str(v.claim), "figure": v.claim.figure, "status": v.status, "says": v.sentence}
        for v in verdicts(table, samples)
    ]
    head = {"name": table.name, "where": table.where, "title": table.title, "short": short}
    return {**head, "kind": table.measure.kind, "rows": rows, "verdicts": found}


def plot(table: Table, samples: Samples, file: Path) -> None:
    """Draw a panel per column: bars of ours with dots for samples, crosses for published."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(1.5 + 3.5 * len(table.columns), 1.2 + 0.35 * len(table.rows)),
        layout="constrained",
    )
    panels = figure.subplots(1, len(table.columns), sharey=True, squeeze=False)[0]
    places = range(len(table.rows))
    for panel, column in zip(panels, table.columns, strict=True):
        for place, row in enumerate(table.rows):
            values = [
                v for v in samples[row.label].get(column.figure, ()) if math.isfinite(v)
            ]  # what has diverged has no bar
            if values:
                panel.barh(place, fmean(values), color=f"C{place % 10}")
                panel.plot(values, [place] * len(values), "k.", markersize=4)
            if column.figure in row.published:
                panel.plot(row.published[column.figure], place, "kx", label="published")
        panel.set(xlabel=column.heading)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(places, [row.label for row in table.rows])
    panels[0].invert_yaxis()
    figure.suptitle(f"{table.name} (dots: seeds or blocks; crosses: published)", fontsize=10)
    figure.savefig(file, dpi=130)
