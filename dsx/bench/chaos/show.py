"""What `dsx bench chaos` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dsx.bench.chaos.bench import Report


def show(report: Report, console: Console) -> None:
    """Print what happened, what was lost, and what is not as it should be."""
    verdict = report.verdict
    title = f"{report.options.engine}, {report.options.preset}: {len(report.faults)} faults"
    table = Table(show_header=False, title=title)
    for kind, count in verdict.events.items():
        cost = report.costs[kind]
        pause = f"{cost['median_seconds']:.2f} s, longest {cost['max_seconds']:.2f} s"
        table.add_row(f"{kind}; its pause of a survivor", f"{count:,}; {pause}")
    table.add_section()
    table.add_row("rounds committed, by fragment", f"{verdict.rounds:,}")
    table.add_row("rounds refused, of a contribution that was wrong", f"{verdict.rounds_refused:,}")
    table.add_row("clusters that joined, or came back", f"{verdict.joins:,}")
    table.add_row("rounds lost", f"{verdict.rounds_lost:,}")
    table.add_row("hashes that differ", f"{verdict.mismatches:,}")
    table.add_row("samples read", f"{verdict.samples:,}")
    table.add_row("samples in no committed contribution", f"{verdict.samples_lost:,}")
    table.add_row("samples read twice", f"{verdict.samples_twice:,}")
    if report.given_up is not None:
        table.add_row("samples read by lost clusters, for nothing", f"{report.given_up:,}")
        table.add_row("samples of lost clusters that nobody has read", f"{report.skipped:,}")
    table.add_section()
    median, most = verdict.pause_median_seconds, verdict.pause_max_seconds
    if median is not None and most is not None:
        table.add_row("pause of a survivor, median", f"{median:.2f} s")
        table.add_row("pause of a survivor, longest", f"{most:.2f} s")
    if verdict.loss is not None:
        table.add_row("loss", f"{verdict.loss:.6f}")
    if report.loss_undisturbed is not None:
        table.add_row("loss after as many samples, undisturbed", f"{report.loss_undisturbed:.6f}")
    console.print(table)
    for problem in verdict.problems:
        console.print(f"- {problem}", markup=False, highlight=False)
    console.print(f"logs in {report.options.directory}", markup=False, highlight=False)
