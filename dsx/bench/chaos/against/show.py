"""What `dsx bench chaos --against torchft` prints behind dsx's own table."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from dsx.bench.chaos.against.bench import Comparison
from dsx.bench.chaos.against.row import Row

_LATE_SECONDS = 0.5
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "rounds due": lambda row: f"{row.rounds_due:,}",
    "kept": lambda row: f"{row.rounds_kept:,}",
    "lost": lambda row: f"{row.rounds_lost:,}",
    "kept by some": lambda row: f"{row.rounds_kept_by_some:,}",
    "pause, median": lambda row: _seconds(row.pauses.median_seconds),
    "longest": lambda row: _seconds(row.pauses.max_seconds),
    "all": lambda row: _seconds(row.pauses.sum_seconds),
    "steps": lambda row: f"{row.steps:,}",
    "in vain": lambda row: f"{row.steps_in_vain:,.1f}",
    "samples lost": lambda row: f"{row.samples_lost:,}",
    "own ends": lambda row: f"{row.own_ends:,}",
    "loss": lambda row: "-" if row.loss is None else f"{row.loss:.6f}",
    "seconds": lambda row: f"{row.seconds:.0f}",
}


def show(found: Comparison, console: Console) -> None:
    """Print a row for each, and what has to be known to read them."""
    ours, theirs = found.ours, found.theirs
    table = Table(
        title=f"{ours.faults} faults, of torchft {found.version}: {theirs.faults}",
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
