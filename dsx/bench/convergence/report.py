"""The table and the figure of a convergence study."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dsx.bench.convergence.task import BASELINE, OUTER_BASELINE, Study
from dsx.core.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def print_table(
    table: Sequence[Mapping[str, Any]], rows: Sequence[dict[str, Any]], title: str, target: float
) -> None:
    """Print one line per preset, as `table` has them, with what single runs `rows` tell."""
    shown = Table(title=title)
    figures = ("outer\nlr", "momen-\ntum", "val loss", "gap %", "tokens", "bytes\nfewer")
    more = ("hidden\n%", "sent", "syncs", "apart %")
    reached = (f"steps to\n{target:.3f}", f"bytes to\n{target:.3f}")
    for heading in ("preset", *figures, *more, *reached):
        shown.add_column(heading, justify="left" if heading == "preset" else "right")
    for row in table:
        own = [run for run in rows if run["preset"] == row["preset"]]
        first, tokens = own[0], row["tokens_ratio"]
        shown.add_row(
            row["preset"],
            "" if row["lr"] is None else f"{row['lr']:g}",
            "" if row["momentum"] is None else f"{row['momentum']:g}",
            spread([run["val_loss"] for run in own], 4),
            spread([run["gap_percent"] for run in own], 1),
            "-" if tokens is None else f"{tokens:.2f}",
            f"{row['bytes_ratio']:.0f}x",
            f"{row['hidden_percent']:.0f}",
            format_bytes(first["bytes_per_cluster"] + first["average_bytes"]),
            f"{first['syncs']:g}",
            f"{100 * mean(run['divergence'] for run in own):.2f}",
            mean_reached(own, "steps_to_target", lambda steps: f"{steps:.0f}"),
            mean_reached(own, "bytes_to_target", format_bytes),
        )
    Console(width=160).print(shown)
    _explain(table)


def _explain(table: Sequence[Mapping[str, Any]]) -> None:
    tries = {row["preset"]: row["tries"] for row in table}
    most = max(count for name, count in tries.items() if name != BASELINE)
    first = table[0]
    print("gap: validation loss above data parallel's of the same seed; +-: standard deviation")
    print("tokens: data parallel's to the same loss, in those of the run; -: fewer than a quarter")
    print("bytes fewer: than a ring of bf16 gradients; hidden: of them, while training goes on")
    print(
        "apart: mean distance of the clusters to their average over its norm, before boundaries; "
        "steps and bytes of a cluster to a validation loss, -: not all seeds reach it"
    )
    print(
        f"data parallel: the best of {tries[BASELINE]}, inner {first['inner']} at "
        f"{first['inner_lr']:g}, the rest at {first['rest_rate']:g} times that; presets: the best "
        f"of up to {most} outer settings there"
    )


def mean_reached(own: list[dict[str, Any]], key: str, show: Callable[[float], str]) -> str:
    """Return the mean over seeds of what a target took; a dash if one has not reached it."""
    values = [row[key] for row in own]
    return "-" if None in values else show(mean(values))


def spread(values: list[float], digits: int) -> str:
    """Return the mean, and the standard deviation of several."""
    has_noise = len(values) > 1 and all(map(math.isfinite, values))
    noise = f" +- {stdev(values):.{digits}f}" if has_noise else ""
    return f"{mean(values):.{digits}f}{noise}"


def plot(rows: Sequence[dict[str, Any]], study: Study, file: Path) -> None:
    """Draw losses over tokens and bytes, and gaps to data parallel along runs and at the end."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["preset"] for row in rows))
    names.sort(key=lambda n: mean(r["gap_percent"] for r in rows if r["preset"] == n))
    colors = {
        name: "#444444" if name == BASELINE else f"C{place % 10}"
        for place, name in enumerate(names)
    }
    figure = Figure(figsize=(12, 9), layout="constrained")
    (over_tokens, over_bytes), (along, at_the_end) = figure.subplots(2, 2)
    tokens = study.num_clusters * study.batch_size * study.sequence_length
    for name in names:
        own = [row["curve"] for row in rows if row["preset"] == name]
        losses = [mean(loss for _, loss, _ in points) for points in zip(*own, strict=True)]
        in_bf16 = 2 if name in (BASELINE, OUTER_BASELINE) else 1  # their curves are of fp32
        sent = [count / in_bf16 for _, _, count in own[0]]
        style = {"color": colors[name], "linewidth": 2 if name == BASELINE else 1.2}
        over_tokens.plot([step * tokens for step, *_ in own[0]], losses, label=name, **style)
        reached = [(x, y) for x, y in zip(sent, losses, strict=True) if x]
        over_bytes.plot([x for x, _ in reached], [y for _, y in reached], **style)
    losses = [point[1] for row in rows for point in row["curve"]]
    lowest = min(filter(math.isfinite, losses), default=1.0)
    for axes in (over_tokens, over_bytes):
        axes.set(ylabel="validation loss", ylim=(0.98 * lowest, 1.5 * lowest))
    over_tokens.set(xlabel="tokens")
    over_tokens.legend(fontsize=8)
    over_bytes.set(xscale="log", xlabel="bytes a cluster has sent (data parallel: bf16)")
    _plot_gaps(rows, names, colors, study.interval, along, at_the_end)
    for axes in (over_tokens, over_bytes, along, at_the_end):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def _plot_gaps(
    rows: Sequence[dict[str, Any]],
    names: Sequence[str],
    colors: Mapping[str, str],
    interval: int,
    along: Axes,
    at_the_end: Axes,
) -> None:
    baseline = {row["seed"]: row["curve"] for row in rows if row["preset"] == BASELINE}
    names = [name for name in names if name != BASELINE]
    for name in names:
        gaps = [
            [
                100 * (loss / base - 1)
                for (_, loss, _), (_, base, _) in zip(r["curve"], baseline[r["seed"]], strict=True)
            ]
            for r in rows
            if r["preset"] == name
        ]
        steps = next(r["curve"] for r in rows if r["preset"] == name)
        mean_gaps = [mean(g) for g in zip(*gaps, strict=True)]
        along.plot([step / interval for step, *_ in steps], mean_gaps, color=colors[name])
    along.set(xlabel=f"rounds of H = {interval}", ylabel="validation loss above data parallel, %")
    for place, name in enumerate(names):
        final = [row["gap_percent"] for row in rows if row["preset"] == name]
        at_the_end.barh(place, mean(final), color=colors[name])
        at_the_end.plot(final, [place] * len(final), "k.", markersize=4)
    at_the_end.set_yticks(range(len(names)), names)
    at_the_end.invert_yaxis()
    at_the_end.set(xlabel="validation loss above data parallel at the end, % (dots: seeds)")
