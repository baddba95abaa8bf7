"""A convergence study of several sizes of the model: how the gaps go with the parameters.

As Eager Updates does it (arXiv:2502.12996, Sec. 3): outer rates are tuned at the first size, and
kept at the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from dsx.bench.convergence.leaderboard import summarize
from dsx.bench.convergence.report import spread
from dsx.bench.convergence.study import (
    Search,
    choose,
    require_runnable,
    require_study,
    run_chosen,
    run_lengths,
    tune_baseline,
)
from dsx.bench.convergence.task import BASELINE, Study

Size = tuple[int, int, int]  # layers, width, heads


def read_sizes(text: str) -> list[Size]:
    """Read LAYERSxWIDTHxHEADS with commas between them; ValueError for what is none."""
    sizes: list[Size] = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,5})x([1-9]\d{0,3})", part)
        if found is None or int(found[2]) % (2 * int(found[3])):
            raise ValueError(
                f"--sizes {text!r} must be LAYERSxWIDTHxHEADS with commas between, each width a "
                "multiple of twice its heads; try 2x32x2,4x64x4"
            )
        sizes.append((int(found[1]), int(found[2]), int(found[3])))
    if len({*sizes}) < max(2, len(sizes)):
        raise ValueError(f"--sizes {text!r} must be two or more different sizes; try 2x32x2,4x64x4")
    return sizes


def compare_sizes(
    study: Study, sizes: Sequence[Size], search: Search, jobs: int, out: Path, figure: Path | None
) -> None:
    """Run the study at every size; write the results to `out`, draw the trend, print it.

    FileNotFoundError if there is no dataset.
    """
    require_study(study)
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = out.with_suffix(".runs.jsonl")
    studies = [
        replace(study, num_layers=layers, hidden_size=width, num_heads=heads)
        for layers, width, heads in sizes
    ]
    for own in studies:
        require_runnable(own, search)
    first = tune_baseline(studies[0], search, jobs, kept)
    chosen = choose(first, search, jobs, kept)
    tries = {name: search.tries(name) for name in (BASELINE, *search.presets)}
    rows: list[dict[str, Any]] = []
    table: list[dict[str, Any]] = []
    for size, shape in zip(sizes, studies, strict=True):
        own = replace(shape, inner_lr=first.inner_lr, rest_rate=first.rest_rate)
        named = {"size": "x".join(map(str, size))}
        found = run_chosen(own, chosen, search.seeds, jobs, kept)
        rows += [{**named, **row} for row in found]
        lengths = run_lengths(own, search.seeds, jobs, kept)
        table += [{**named, **row} for row in summarize(found, own, tries, lengths)]
        tries = {}  # nothing is chosen at the others
    out.write_text(json.dumps(table, indent=1) + "\n")
    single = out.with_suffix(".single.json")
    single.write_text(json.dumps(rows, indent=1) + "\n")
    print_trend(rows, f"{study.num_clusters} clusters, H = {study.interval}")
    figure = figure or out.with_suffix(".png")
    plot_trend(rows, figure)
    print(f"results in {out}, single runs in {single}, figure in {figure}")


def print_trend(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print a line per preset and a column per size: the gap, and data parallel's loss."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    table = Table("preset", title=f"{title}: above data parallel, %")
    for size in sizes:
        numel = next(row["parameters"] for row in rows if row["size"] == size)
        table.add_column(f"{size}\n{numel:,}", justify="right")
    for name in dict.fromkeys(row["preset"] for row in rows):
        cells: list[str] = []
        for size in sizes:
            own = [row for row in rows if (row["preset"], row["size"]) == (name, size)]
            figure = "val_loss" if name == BASELINE else "gap_percent"
            cells.append(spread([row[figure] for row in own], 3 if name == BASELINE else 2))
        table.add_row(f"{name} (loss)" if name == BASELINE else name, *cells)
    Console(width=150).print(table)
    print("columns: layers x width x heads, and parameters; +-: standard deviation")


def plot_trend(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw every preset's gap against the parameters, with its seeds as dots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [n for n in dict.fromkeys(row["preset"] for row in rows) if n != BASELINE]
    for place, name in enumerate(names):
        gaps: dict[int, list[float]] = {}
        for row in rows:
            if row["preset"] == name:
                gaps.setdefault(row["parameters"], []).append(row["gap_percent"])
        color = f"C{place % 10}"
        axes.plot(list(gaps), [mean(gap) for gap in gaps.values()], color=color, label=name)
        dots = [(numel, gap) for numel, own in gaps.items() for gap in own]
        axes.plot(*zip(*dots, strict=True), ".", color=color, markersize=4)
    axes.set(xscale="log", xlabel="parameters", ylabel="validation loss above data parallel, %")
    axes.legend(fontsize=8)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
