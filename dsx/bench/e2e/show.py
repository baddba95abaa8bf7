"""What `dsx bench e2e` shows: one table per ratio, the targets, JSON, and a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dsx.bench.e2e.bench import Row
from dsx.core.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CEILING, _SYNCHRONOUS = "no communication", "data_parallel"


@dataclass(frozen=True)
class Target:
    """What is asked of every row that it `concerns`: that its `value` `is_met`."""

    text: str
    concerns: Callable[[Row], bool]
    value: Callable[[Row], float]
    is_met: Callable[[float], bool]
    format: str


def _wire_share(row: Row) -> float:
    return row.wire_bytes / (row.payload_bytes or math.nan)


TARGETS = (
    Target(
        "utilization of overlapped presets at least 97 %",
        lambda row: row.is_overlapped,
        lambda row: row.utilization,
        lambda value: value >= 0.97,
        "{:.1%}",
    ),
    Target(
        "dilocox at least 0.9 of the ideal speed-up over all-reduce, that of the ceiling",
        lambda row: row.method == "dilocox",
        lambda row: row.utilization,  # all-reduce is in both speed-ups, and cancels
        lambda value: value >= 0.9,
        "{:.3f}",
    ),
    Target(
        "utilization within 5 % of the planner's",
        lambda row: row.method not in (_CEILING, _SYNCHRONOUS),
        lambda row: abs(row.utilization / row.predicted_utilization - 1),
        lambda value: value <= 0.05,
        "{:.1%}",
    ),
    Target(
        "bytes on the wire at most 1.06 of the payload",
        lambda row: row.method not in (_CEILING, _SYNCHRONOUS),
        _wire_share,
        lambda value: value <= 1.06,
        "{:.3f}",
    ),
    Target(
        "payload equal to the planner's, to the byte",
        lambda row: None not in (row.payload_bytes, row.planned_bytes),
        lambda row: abs((row.payload_bytes or 0) - (row.planned_bytes or 0)),
        lambda value: value == 0,
        "{:.0f}",
    ),
)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print a table per ratio and, below it, which targets are met by all rows, and by how much."""
    for ratio in dict.fromkeys(row.ratio for row in rows):
        own = [row for row in rows if row.ratio == ratio]
        console.print(_table(own))
        for target in TARGETS:
            console.print(_verdict(target, own), highlight=False, soft_wrap=True)
        if any(row.transport == "link" for row in own):
            console.print(_verdict_of_links(own), highlight=False, soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    seconds = first.ratio * first.ceiling_seconds
    latency = first.latency_milliseconds
    table = Table(
        title=f"ratio {first.ratio:g}: {first.megabits_per_second:.3g} Mbit/s each way, "
        f"{f'{latency:g} ms one way, ' if latency else ''}a step "
        f"{1000 * first.ceiling_seconds:.0f} ms, an all-reduce of the gradients {seconds:.3g} s; "
        f"{first.steps} steps each of {first.shape}",
        title_justify="left",
    )
    table.add_column("method")
    for name in ("H", "tokens/s", "x all-\nreduce", "util.", "half\nrange", "planned\nutil.",
                 "exposed s\nper H", "waited s\nper H", "payload", "planned\npayload", "wire",
                 "wire /\npayload", "loss"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.interval or "-"),
            f"{row.tokens_per_second:,.0f}",
            f"{row.speedup:.1f}",
            f"{row.utilization:.1%}",
            f"{row.utilization_spread:.1%}" if row.utilization_spread else "-",
            f"{row.predicted_utilization:.1%}",
            f"{row.exposed_seconds:.2f}",
            _waited(row),
            size_or_dash(row.payload_bytes),
            size_or_dash(row.planned_bytes),
            size_or_dash(row.wire_bytes),
            f"{_wire_share(row):.3f}" if row.payload_bytes else "-",
            f"{row.validation_loss:.4f}",
        )
    return table


def _verdict(target: Target, rows: Sequence[Row]) -> str:
    values = {row.name: target.value(row) for row in rows if target.concerns(row)}
    if not values:
        return f"  -    {target.text}: no such run"
    missed = {name: value for name, value in values.items() if not target.is_met(value)}
    shown = missed or values
    what = ", ".join(f"{name} {target.format.format(value)}" for name, value in shown.items())
    return f"  {'MISS' if missed else 'met '} {target.text}: {what}"


def _waited(row: Row) -> str:
    if row.wait_seconds is None:
        return "-"
    half_range = f" ±{row.wait_half_range:.2f}" if row.wait_half_range else ""
    return f"{row.wait_seconds:.2f}{half_range}"


def _verdict_of_links(rows: Sequence[Row]) -> str:
    """Say of every method that ran over both how much longer it waited over links."""
    over_gloo = {row.method: row for row in rows if row.transport == "gloo"}
    said: list[tuple[bool, str]] = []
    for row in rows:
        gloo = over_gloo.get(row.method)
        if row.transport == "gloo" or gloo is None or None in (row.wait_seconds, gloo.wait_seconds):
            continue
        more = (row.wait_seconds or 0.0) - (gloo.wait_seconds or 0.0)
        most = max(row.wait_half_range or 0.0, gloo.wait_half_range or 0.0)
        said.append((more <= most, f"{row.name} {more:+.3f} s of {most:.3f} s"))
    text = "links wait no longer than gloo, or by less than a half range"
    if not said:
        return f"  -    {text}: no such run"
    missed = [words for is_met, words in said if not is_met]
    shown = ", ".join(missed or [words for _, words in said])
    return f"  {'MISS' if missed else 'met '} {text}: {shown}"


def size_or_dash(count: float | None) -> str:
    """Return a number of bytes; a dash for none."""
    return format_bytes(count, 4) if count else "-"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one object per line of the table."""
    return [asdict(row) for row in rows]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write `figure_of` to a file."""
    figure_of(rows).savefig(path, dpi=110)


def figure_of(rows: Sequence[Row]) -> Figure:
    """Draw measured utilization per method, with the planner's beside it, a panel per ratio."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.method != _CEILING]
    ratios = list(dict.fromkeys(row.ratio for row in measured))
    names = list(dict.fromkeys(row.name for row in measured))[::-1]  # a run may lack some
    figure = Figure(figsize=(5.2 * len(ratios), 4.2), layout="constrained")
    panels = figure.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
    for panel, ratio in zip(panels, ratios, strict=True):
        own = [row for row in measured if row.ratio == ratio]
        places = [names.index(row.name) for row in own]
        panel.barh(places, [100 * row.utilization for row in own], color="#1f77b4")
        planned = [100 * row.predicted_utilization for row in own]
        panel.plot(planned, places, "k|", markersize=14, label="planner")
        panel.set_yticks(range(len(names)), names)
        panel.set_xlim(0, 105)
        panel.set_xlabel("compute utilization, %")
        panel.set_title(f"all-reduce / step = {ratio:g}", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", fontsize=8)
    return figure
