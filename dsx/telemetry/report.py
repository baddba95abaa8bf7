"""What a run did, from the records it wrote: numbers, a table, and one figure.

Reads a run's folder as run_folder.py opens it. Any field of a record may be missing or null, so
that the files of a run under way, of a killed run or of one site alone can be read, too.

Bytes are payload that one cluster hands to the network for the others; all clusters send the same,
but for rounding. "Synchronous" is what data parallel training across the clusters would have sent
over the same steps: the figure of summary.json, or without it one exchange of the whole model as
this run sends it, at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsx.core.units import format_bytes
from dsx.telemetry.in_words import said_of_heal, said_of_memory
from dsx.telemetry.run_folder import ClusterRun, Record, Run, open_run, say_end
from dsx.telemetry.sound import sound_record

Series = list[tuple[float, float]]
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


@dataclass(frozen=True)
class ClusterReport:
    """One cluster's totals; None where no record has the field.

    `commit_seconds_mean` is of the rounds that training waited for, where most were.
    """

    cluster: int
    steps: int
    first_loss: float | None
    last_loss: float | None
    tokens: int
    seconds: float
    tokens_per_second: float | None
    utilization: float | None
    bytes_sent: int
    syncs: int
    wait_seconds: float
    transfer_seconds_mean: float | None
    commit_seconds_mean: float | None


@dataclass(frozen=True)
class RunReport:
    """A run: its clusters in order, bytes by one cluster, and summary.json as it is.

    `about` says in a few lines what ran, how it ended, and where its last checkpoint is.
    """

    run_dir: str
    clusters: list[ClusterReport]
    bytes_sent: int
    bytes_sent_synchronous: int | None
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    about: list[str] = field(default_factory=list[str])


def summarize(run_dir: str | Path) -> RunReport:
    """Return the totals of a run. FileNotFoundError or ValueError says what cannot be read."""
    run, clusters = _open(run_dir)
    reports = [summarize_cluster(records) for records in clusters]
    return RunReport(
        run_dir=str(run.directory),
        clusters=reports,
        bytes_sent=max(report.bytes_sent for report in reports),
        bytes_sent_synchronous=_synchronous_bytes(clusters, run.summary),
        summary=run.summary,
        about=_about_lines(run),
    )


def report(run_dir: str | Path, figure: Path | None = None) -> None:
    """Print a table of the run, and draw into `figure`; without one into plot.png in its folder.

    A folder that cannot be written to is told of; OSError for a `figure` that cannot.
    """
    from rich.console import Console

    totals = summarize(run_dir)
    console = Console(highlight=False)
    console.print(_table(totals))
    for line in [*_closing_lines(totals), _draw(run_dir, figure, Path(totals.run_dir))]:
        console.print(line, markup=False, soft_wrap=True)


def _draw(run_dir: str | Path, figure: Path | None, folder: Path) -> str:
    """Draw the run; return what to say of it."""
    usual = folder / "plot.png"
    try:
        plot(run_dir, figure or usual)
    except OSError as error:
        if figure is not None:
            raise
        return f"no figure: {usual} cannot be written ({error.strerror}); --plot FILE.png can"
    return f"figure written to {figure or usual}"


def plot(run_dir: str | Path, out_png: str | Path) -> None:
    """Draw loss above and bytes sent below, against the inner step, into a PNG file.

    FileNotFoundError or ValueError says what cannot be read.
    """
    from matplotlib.figure import Figure

    run, clusters = _open(run_dir)
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_loss(above, clusters, run.summary)
    _draw_bytes(below, clusters[0], _synchronous_bytes(clusters, run.summary))
    for axes in (above, below):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out_png, dpi=150, format="png")


def _open(path: str | Path) -> tuple[Run, list[ClusterRun]]:
    run = open_run(path)
    parts = [part for part in run.clusters if part.steps]
    if not parts:
        raise ValueError(f"{run.directory} holds no records of inner steps yet: wait for the first")
    return run, parts


def _series(records: list[Record], name: str) -> Series:
    return [(r["step"], r[name]) for r in records if r.get(name) is not None]


def _sums(records: list[Record], *names: str) -> tuple[float, ...]:
    """Add up each field over the records that have all of them."""
    complete = [r for r in records if all(r.get(name) is not None for name in names)]
    return tuple(float(sum(r[name] for r in complete)) for name in names)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def summarize_cluster(records: ClusterRun) -> ClusterReport:
    """Return the totals of one cluster's records; the last loss is the mean of ten."""
    losses = [loss for _, loss in _series(records.steps, "loss")]
    tokens, token_seconds = _sums(records.steps, "tokens", "seconds")
    blocked, blocked_of = _sums(records.steps, "blocked_seconds", "seconds")
    transfers = [s["transfer_seconds"] for s in records.syncs if s.get("transfer_seconds")]
    waited_for = [s for s in records.syncs if s.get("launched_step", -1) == s.get("applied_step")]
    commits = [s["commit_seconds"] for s in waited_for if s.get("commit_seconds")]
    return ClusterReport(
        cluster=records.cluster,
        steps=int(records.rows[-1]["step"]),
        first_loss=losses[0] if losses else None,
        last_loss=_mean(losses[-10:]),
        tokens=int(tokens),
        seconds=_sums(records.steps, "seconds")[0],
        tokens_per_second=tokens / token_seconds if token_seconds else None,
        utilization=1 - blocked / blocked_of if blocked_of else None,
        bytes_sent=int(max((b for _, b in _series(records.rows, "bytes_sent")), default=0)),
        syncs=len(records.syncs),
        wait_seconds=_sums(records.syncs, "wait_seconds")[0],
        transfer_seconds_mean=_mean(transfers),
        commit_seconds_mean=_mean(commits) if 2 * len(waited_for) > len(records.syncs) else None,
    )


def _synchronous_bytes(clusters: list[ClusterRun], summary: Record) -> int | None:
    """Return what one cluster would have sent if every step had been a full exchange."""
    known = summary.get("bytes_sent_synchronous")
    if known is not None:
        return int(known)
    totals = summarize_cluster(clusters[0])
    if not totals.syncs:
        return None
    num_fragments = len({(s.get("stage"), s.get("fragment")) for s in clusters[0].syncs})
    return totals.bytes_sent * num_fragments * totals.steps // totals.syncs


def _draw_loss(axes: Any, clusters: list[ClusterRun], summary: Record) -> None:
    validation = summary.get("val_loss_clusters") or []
    for index, records in enumerate(clusters):
        color = _COLORS[index % len(_COLORS)]
        series = _series(records.steps, "loss")
        axes.plot(*_columns(series), color=color, alpha=0.25, linewidth=0.8)
        label = f"cluster {records.cluster}, training"
        axes.plot(*_columns(_smooth(series)), color=color, linewidth=1.6, label=label)
        if records.cluster < len(validation) and validation[records.cluster] is not None:
            loss = validation[records.cluster]
            label = f"cluster {records.cluster}, validation: {loss:.3f}"
            axes.axhline(loss, color=color, linestyle=":", linewidth=1.4, label=label)
    average, entropy = summary.get("val_loss_average"), summary.get("unigram_entropy")
    if average is not None:
        label = f"average of clusters, validation: {average:.3f}"
        axes.axhline(average, color="black", linestyle="--", linewidth=1.2, label=label)
    if entropy is not None:
        label = f"unigram entropy: {entropy:.3f}"
        axes.axhline(entropy, color="#888888", linewidth=1.2, label=label)
    axes.set_ylabel("loss (nats per token)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)


def _draw_bytes(axes: Any, records: ClusterRun, synchronous: int | None) -> None:
    from matplotlib.ticker import FuncFormatter

    sent = _series(records.rows, "bytes_sent")
    axes.step(*_columns(sent), where="post", color="#1f77b4", label="this run")
    if synchronous:
        last = records.rows[-1]["step"]
        line = [1, last], [synchronous / last, synchronous]
        axes.plot(*line, color="#d62728", linestyle="--", label="synchronous data parallel")
    if any(count for _, count in sent):
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(_tick_label))
    axes.set_xlabel("inner step")
    axes.set_ylabel("sent by each cluster")
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _tick_label(count: float, position: int) -> str:
    return format_bytes(count)


def _smooth(series: Series) -> Series:
    """Average each value with its neighbours, over a twentieth of the series."""
    reach = len(series) // 40
    smooth: Series = []
    for index, (step, _) in enumerate(series):
        near = series[max(0, index - reach) : index + reach + 1]
        smooth.append((step, sum(value for _, value in near) / len(near)))
    return smooth


def _columns(series: Series) -> tuple[list[float], list[float]]:
    return [step for step, _ in series], [value for _, value in series]


def _table(totals: RunReport) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    validation = totals.summary.get("val_loss_clusters") or []
    table.add_column("")
    for name in ("steps", "train loss", "val loss", "tokens/s", "utilization", "sent"):
        table.add_column(name, justify="right")
    for cluster in totals.clusters:
        held_out = validation[cluster.cluster] if cluster.cluster < len(validation) else None
        table.add_row(
            f"cluster {cluster.cluster}",
            str(cluster.steps),
            _number(cluster.last_loss, ".3f"),
            _number(held_out, ".4f"),
            _number(cluster.tokens_per_second, ",.0f"),
            _number(cluster.utilization, ".1%"),
            format_bytes(cluster.bytes_sent),
        )
    table.add_section()
    summary = totals.summary
    table.add_row(
        "average",
        _number(summary.get("steps"), "d"),
        "",
        _number(summary.get("val_loss_average"), ".4f"),
        _number(summary.get("tokens_per_second"), ",.0f"),
        _number(summary.get("utilization"), ".1%"),
        "",
    )
    return table


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _closing_lines(totals: RunReport) -> list[str]:
    lines: list[str] = []
    entropy = totals.summary.get("unigram_entropy")
    if entropy is not None:
        lines.append(f"losses in nats per token; unigram entropy of the corpus {entropy:.4f}")
    if totals.bytes_sent_synchronous and totals.bytes_sent:
        ratio = totals.bytes_sent_synchronous / totals.bytes_sent
        sent = format_bytes(totals.bytes_sent_synchronous)
        lines.append(f"synchronous data parallel would have sent {sent}: {ratio:.1f} times as much")
    commits = [c.commit_seconds_mean for c in totals.clusters if c.commit_seconds_mean]
    if commits:
        lines.append(
            f"training waits {max(commits) * 1e3:.2g} ms a round for the commit: the round trip in "
            "which clusters tell each other that they hold the same mean"
        )
    return [*totals.about, *lines]


def _about_lines(run: Run) -> list[str]:
    """Say what run.json knows; nothing of a run of dsx 0.1, which has none."""
    lines: list[str] = []
    told = [(part.cluster, part.about) for part in run.clusters if part.about]
    if told:
        starts = told[0][1]["starts"]
        start = starts[-1]
        preset = start["config"]["resolved"]["preset"]
        again = f", started {len(starts)} times" if len(starts) > 1 else ""
        lines.append(
            f"{preset}, {start['num_clusters']} clusters of {start['ranks']} ranks, begun "
            f"{starts[0]['time']}{again}"
        )
        ends = {cluster: say_end(about["starts"][-1]) for cluster, about in told}
        if len(set(ends.values())) == 1:
            lines.append(f"{'all clusters' if len(ends) > 1 else 'the run'}: {min(ends.values())}")
        else:
            lines += [f"cluster {cluster}: {end}" for cluster, end in ends.items()]
        saved = [run.directory / entry["path"] for entry in told[0][1]["checkpoints"]]
        there = [path for path in saved if path.is_dir()]
        if saved:
            last = there[-1] if there else "none of those saved is still there"
            lines.append(f"last checkpoint: {last}")
    for record in next((part.members for part in run.clusters if part.members), []):
        trained = ", ".join(map(str, record["members"]))
        several = "clusters" if len(record["members"]) > 1 else "cluster"
        lines.append(f"from step {record['step']} on, without who was lost: {several} {trained}")
    lines += [
        f"cluster {part.cluster}: {said_of_heal(record)}"
        for part in run.clusters for told in part.heals if (record := sound_record(told))
    ]  # fmt: skip
    if memory := said_of_memory({c.cluster: c.machine for c in run.clusters}):
        lines.append(memory)
    for part in run.clusters:
        skipped = part.steps[-1].get("skipped_steps") if part.steps else None
        if skipped:
            taken = part.steps[-1]["step"]
            lines.append(f"cluster {part.cluster}: {skipped} of {taken} inner steps were skipped")
    if run.left_out:
        lines.append(f"left out: {', '.join(run.left_out)}, whose records are of another run")
    return lines
