"""What `dsx bench wall-clock` shows: a table, what follows from it, and two panels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from dsx.bench.wall_clock.bench import Report, best_rate
from dsx.bench.wall_clock.score import Part, Point
from dsx.core.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = {
    "fast": "data parallel, no slow line",
    "recommended": "recommended, slow line",
    "slow": "data parallel, slow line",
}
_COLORS = {"fast": "#7f7f7f", "recommended": "#1f77b4", "slow": "#d62728"}
_EDGES = "the best rate is at an end of --rates: another might be better"


def show(report: Report, console: Console) -> None:
    """Print a row per run, short ones first, and what they say of each other."""
    table = Table(caption="seconds per step of cluster 0; bytes on the wire of one cluster")
    table.add_column("run")
    for name in ("rate", "steps", "minutes", "s/step", "forward ms\n10 % - 90 %", "CPU\ns/step",
                 "waited s", "snapshots s", "on the wire", "payload", "loss"):  # fmt: skip
        table.add_column(name, justify="right")
    for part in (*report.tries, *report.parts):
        table.add_row(
            part.name, f"{part.rate:g}", f"{part.steps:,}", f"{part.last.seconds / 60:.1f}",
            f"{part.step_seconds:.3g}", _forward(part), f"{part.cpu_seconds:.3g}",
            "-" if part.wait_seconds is None else f"{part.wait_seconds:.1f}",
            f"{part.snapshot_seconds:.2f}",
            format_bytes(part.last.wire_bytes),
            "-" if part.payload_bytes is None else format_bytes(part.payload_bytes),
            f"{part.last.loss:.4f}",
        )  # fmt: skip
    console.print(table)
    for line in conclusions(report):
        console.print(line, highlight=False, soft_wrap=True)


def conclusions(report: Report) -> list[str]:
    """Say how the runs compare, and what may be wrong with that."""
    fast, ours, slow = (_part(report, name) for name in _LABELS)
    ahead = continued(fast, slow)[-1]
    fewer = ahead.wire_bytes / ours.last.wire_bytes
    said = [
        f"recommended ends {100 * (ours.last.loss / fast.last.loss - 1):+.2f} % from data parallel "
        f"of the same {fast.steps:,} steps",
        f"it took {ours.last.seconds / fast.last.seconds:.2f} times as long as data parallel "
        f"without a slow line; on that line data parallel had done {slow.steps:,} steps after "
        f"{slow.last.seconds / 60:.1f} minutes, and would have needed {_duration(ahead.seconds)}, "
        f"{ahead.seconds / ours.last.seconds:.0f} times as long as recommended",
        f"it put {fewer:.0f} times fewer bytes on the wire than fp32 gradients do, {fewer / 2:.0f} "
        "times fewer than bf16 ones would, headers and the average of the finished model included",
    ]
    if (busier := fast.forward_seconds / ours.forward_seconds) and not 0.9 < busier < 1.1:
        said.append(f"a forward, which sends nothing, took {busier:.2f} times as long in data "
                    "parallel without a slow line as in recommended: this machine was not quiet, "
                    "and times cannot be compared")  # fmt: skip
    if (apart := difference(fast, slow)) > 1e-3:
        said.append(f"data parallel with and without the line differ by {apart:.2g} in loss at the "
                    "same steps, so the continued curve is not quite its own")  # fmt: skip
    said += [
        f"{_LABELS[part.name]}: the loss is {part.last.loss}: it has diverged; try smaller --rates"
        for part in report.parts if not math.isfinite(part.last.loss)
    ]  # fmt: skip
    for mode, name in (("data_parallel", "data parallel"), ("dsx", "recommended")):
        tried = [part for part in report.tries if part.mode == mode]
        ends = (min(p.rate for p in tried), max(p.rate for p in tried)) if tried else ()
        if tried and best_rate(tried) in ends:
            said.append(f"{name}: {_EDGES}")
    advice = report.plan.advice()
    return [*said, *([advice] if advice else [])]


def continued(fast: Part, slow: Part) -> list[Point]:
    """Return data parallel on the slow line to its end, at the pace and the bytes of what was run.

    It takes the steps of the run on the fast line: the losses are those.
    """
    seconds = slow.last.seconds / slow.steps
    wire_bytes = slow.last.wire_bytes / slow.steps
    return [Point(p.step, p.step * seconds, round(p.step * wire_bytes), p.loss) for p in fast.curve]


def difference(fast: Part, slow: Part) -> float:
    """Return the largest difference of losses at the same step; 0.0 where there is no such step.

    From what is not finite all is infinitely far.
    """
    known = {point.step: point.loss for point in fast.curve}
    apart = [abs(p.loss - known[p.step]) for p in slow.curve if p.step in known]
    return max((d if math.isfinite(d) else math.inf for d in apart), default=0.0)


def draw(report: Report, path: Path) -> None:
    """Write `figure_of` to a file."""
    figure_of(report).savefig(path, dpi=110)


def figure_of(report: Report) -> Figure:
    """Draw losses of averaged models over wall time and over bytes, both logarithmic."""
    from matplotlib.figure import Figure

    fast, slow = _part(report, "fast"), _part(report, "slow")
    plan = report.plan
    # before a first launch there are a few bytes that keep connections open
    least_bytes = _part(report, "recommended").last.wire_bytes / 1000
    figure = Figure(figsize=(10.4, 4.8), layout="constrained")
    time, sent = figure.subplots(1, 2, sharey=True)
    for name, label in _LABELS.items():
        part = _part(report, name)
        style = {"color": _COLORS[name], "marker": ".", "markersize": 4}
        label = f"{label}: {part.last.loss:.3f} after {_duration(part.last.seconds)}"
        time.plot(
            [p.seconds for p in part.curve], [p.loss for p in part.curve], label=label, **style
        )
        begun = [p for p in part.curve if p.wire_bytes > least_bytes]
        sent.plot([p.wire_bytes for p in begun], [p.loss for p in begun], **style)
    ahead = [p for p in continued(fast, slow) if p.step >= slow.steps]
    style = {"color": _COLORS["slow"], "linestyle": ":"}
    label = f"the same at this pace: {ahead[-1].loss:.3f} after {_duration(ahead[-1].seconds)}"
    time.plot([p.seconds for p in ahead], [p.loss for p in ahead], label=label, **style)
    sent.plot([p.wire_bytes for p in ahead], [p.loss for p in ahead], **style)
    time.set_ylabel("validation loss, nats per token")
    time.set_xlabel("wall time, s")
    sent.set_xlabel("bytes on the wire, per cluster")
    for panel in (time, sent):
        panel.set_xscale("log")
        panel.grid(alpha=0.3)
    tokens = fast.steps * plan.tokens_per_step
    figure.suptitle(
        f"{plan.num_parameters / 1e6:.3g} M parameters, {tokens / 1e6:.3g} M tokens; on the slow "
        f"line an all-reduce takes {plan.ratio:.3g} times as long as a step computes",
        fontsize=10,
    )
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _forward(part: Part) -> str:
    mean = f"{1000 * part.forward_seconds:.3g}"
    if part.forward_deciles is None:
        return mean
    low, high = (f"{1000 * seconds:.3g}" for seconds in part.forward_deciles)
    return f"{mean} ({low} - {high})"


def _part(report: Report, name: str) -> Part:
    return next(part for part in report.parts if part.name == name)


def _duration(seconds: float) -> str:
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
