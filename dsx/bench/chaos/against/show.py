"""What `dsx bench chaos --against torchft` prints behind dsx's own table."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from dsx.bench.chaos.against.bench import Comparison
from dsx.bench.chaos.against.row import Row

_LATE_SECONDS = 0.5
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "rounds due, by fragment": lambda row: f"{row.rounds_due:,}",
    "rounds kept": lambda row: f"{row.rounds_kept:,}",
    "rounds lost": lambda row: f"{row.rounds_lost:,}",
    "rounds kept by some, who heal the others": lambda row: f"{row.rounds_kept_by_some:,}",
    "hashes that differ": lambda row: f"{row.mismatches:,}",
    "pause of a survivor, median": lambda row: _seconds(row.pauses.median_seconds),
    "pause of a survivor, longest": lambda row: _seconds(row.pauses.max_seconds),
    "pauses of all faults together": lambda row: _seconds(row.pauses.sum_seconds),
    "killed, or joining: back in training, median": lambda row: _seconds(row.back.median_seconds),
    "killed, or joining: back in training, longest": lambda row: _seconds(row.back.max_seconds),
    "samples trained on, of all clusters": lambda row: f"{row.steps:,}",
    "of these in vain: in no mean": lambda row: f"{row.steps_in_vain:,.1f}",
    "samples in no mean, and not read again": lambda row: f"{row.samples_lost:,}",
    "loss": lambda row: "-" if row.loss is None else f"{row.loss:.6f}",
    "seconds until the end": lambda row: f"{row.seconds:.0f}",
}


def show(found: Comparison, console: Console) -> None:
    """Print a row for each, and what has to be known to read them."""
    ours, theirs = found.ours, found.theirs
    table = Table(
        title=f"dsx: {ours.faults} faults; torchft {found.version}: {theirs.faults}",
        title_justify="left",
    )
    table.add_column("")
    for name in (ours.name, theirs.name):
        table.add_column(name, justify="right")
    for name, tell in _COLUMNS.items():
        table.add_row(name, tell(ours), tell(theirs))
    console.print(table)
    for line in _notes(found):
        console.print(line, markup=False, highlight=False)


def _notes(found: Comparison) -> list[str]:
    job = found.job
    late = [seconds for seconds in found.late_seconds if seconds > _LATE_SECONDS]
    notes = [
        f"torchft: groups of one process, H {job.interval}, {job.fragments} fragment(s), delay "
        f"{job.delay}, fp32; a group is dead after {job.heartbeat_timeout_seconds:g} s without a "
        f"heartbeat, its collectives have {job.collective_timeout_seconds:g} s",
        "kill_leader ends the cluster that leads dsx's log, and torchft's lighthouse",
    ]
    if late:
        notes.append(f"{len(late)} fault(s) came later to torchft, by up to {max(late):.1f} s")
    return [*notes, *(f"- {line}" for line in (*found.own_ends, *found.problems))]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
