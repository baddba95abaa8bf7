"""The table and the figure of a convergence study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from dsx.bench.convergence.task import BASELINE
from dsx.core.units import format_bytes


def print_table(rows: list[dict[str, Any]], title: str, target: float) -> None:
    """Print one line per preset, the best first."""
    names = list(dict.fromkeys(row["preset"] for row in rows))
    table = Table(title=title)
    figures = ("outer\nlr", "momen-\ntum", "val loss", "perplexity", "gap %", "sent", "syncs")
    reached = ("apart %", f"steps to\n{target:.3f}", f"bytes to\n{target:.3f}")
    for heading in ("preset", *figures, *reached):
        table.add_column(heading, justify="left" if heading == "preset" else "right")
    ordered = sorted(names, key=lambda n: mean(r["val_loss"] for r in rows if r["preset"] == n))
    for name in ordered:
        own = [row for row in rows if row["preset"] == name]
        first = own[0]
        table.add_row(
            name,
            "" if first["lr"] is None else f"{first['lr']:g}",
            "" if first["momentum"] is None else f"{first['momentum']:g}",
            spread([row["val_loss"] for row in own], 4),
            spread([row["perplexity"] for row in own], 2),
            spread([row["gap_percent"] for row in own], 1),
            format_bytes(first["bytes_per_cluster"]),
            f"{first['syncs']:g}",
            f"{100 * mean(row['divergence'] for row in own):.2f}",
            mean_reached(own, "steps_to_target", lambda steps: f"{steps:.0f}"),
            mean_reached(own, "bytes_to_target", format_bytes),
        )
    Console(width=150).print(table)
    print("gap: validation loss above data parallel's of the same seed; +-: standard deviation")
    print(
        "apart: mean distance of the clusters to their average over its norm, before boundaries; "
        "steps and bytes of a cluster to a validation loss, -: not all seeds reach it"
    )


def mean_reached(own: list[dict[str, Any]], key: str, show: Callable[[float], str]) -> str:
    """Return the mean over seeds of what a target took; a dash if one has not reached it."""
    values = [row[key] for row in own]
    return "-" if None in values else show(mean(values))


def spread(values: list[float], digits: int) -> str:
    """Return the mean, and the standard deviation of several."""
    noise = f" +- {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{noise}"


def plot(rows: list[dict[str, Any]], interval: int, file: Path) -> None:
    """Draw the gap to data parallel against the rounds, and the final gaps with their spread."""
    from matplotlib.figure import Figure

    baseline = {row["seed"]: row["curve"] for row in rows if row["preset"] == BASELINE}
    names = [n for n in dict.fromkeys(row["preset"] for row in rows) if n != BASELINE]
    names.sort(key=lambda n: mean(r["gap_percent"] for r in rows if r["preset"] == n))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = [f"C{i % 10}" for i in range(len(names))]
    for name, color in zip(names, colors, strict=False):
        own = [row for row in rows if row["preset"] == name]
        gaps = [
            [
                100 * (loss / base - 1)
                for (_, loss, _), (_, base, _) in zip(r["curve"], baseline[r["seed"]], strict=True)
            ]
            for r in own
        ]
        rounds = [step / interval for step, *_ in own[0]["curve"]]
        left.plot(rounds, [mean(g) for g in zip(*gaps, strict=True)], color=color)
    left.set(xlabel=f"rounds of H = {interval}", ylabel="validation loss above data parallel, %")
    left.set_title("along the run (colors as on the right)", fontsize=10)
    for place, (name, color) in enumerate(zip(names, colors, strict=False)):
        final = [row["gap_percent"] for row in rows if row["preset"] == name]
        right.barh(place, mean(final), color=color)
        right.plot(final, [place] * len(final), "k.", markersize=4)
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set(xlabel="validation loss above data parallel, % (dots: seeds)")
    right.set_title("at the end", fontsize=10)
    for axes in (left, right):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
