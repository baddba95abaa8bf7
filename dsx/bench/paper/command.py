"""`dsx bench paper` on the command line.

    dsx bench paper                            # the tables
    dsx bench paper dilocox-fig3 --short

A mistake of the user ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from rich.console import Console

    from dsx.bench.paper.table import Run, Samples, Table

Option = typer.Option


def complete(incomplete: str) -> list[str]:
    """Return the tables whose names begin so."""
    from dsx.bench.paper import tables

    return tables.complete(incomplete)


Name = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="Of a table.", autocompletion=complete),
]
Short = Annotated[bool, Option("--short", help="Fewer seeds and steps: under 5 minutes.")]
Data = Annotated[Path, Option(help="A dataset of `dsx data build`.")]
JsonFile = Annotated[
    Path | None,
    Option("--json", metavar="FILE", help="The results; default: NAME.json in runs/paper."),
]
Plot = Annotated[Path | None, Option(metavar="FILE.png", help="Draw the table there.")]
Jobs = Annotated[
    int | None, Option(help="Trainings at a time, one thread each; default: one a core.", min=1)
]


@one_line_errors("bench paper")
def paper(
    name: Name = None,
    short: Short = False,
    data: Data = Path("data/stdlib"),
    json_file: JsonFile = None,
    plot: Plot = None,
    jobs: Jobs = None,
) -> None:
    """Measure a paper's table again, ours beside published.

    Rows have the paper's labels; a sentence computed from the measurement says whether the paper's
    order of methods holds here. Without a NAME the tables are listed. Finished trainings are kept
    beside the JSON file, in runs.jsonl, for all tables, and not run again. Tables on throttled
    lines exit with 77 where namespaces or `tc` are not to be had.
    """
    from rich.console import Console

    from dsx.bench.paper import tables
    from dsx.bench.paper.table import Run

    if name is None:
        list_tables(Console())
        return
    table = tables.find(name)
    out = json_file or Path("runs/paper") / f"{name}{'.short' if short else ''}.json"
    if json_file is None:
        out.parent.mkdir(parents=True, exist_ok=True)
    require_place("--json", out)
    require_place("--plot", plot)
    run = Run(data, short, jobs or os.cpu_count() or 1, out.with_name("runs.jsonl"))
    minutes = table.measure.minutes(table.rows, run)
    typer.echo(f"{name}: {table.title}; about {minutes:.2g} minutes", err=True)
    show_measured(table, _measure(table, run), run, out, plot)


def list_tables(console: Console) -> None:
    """Print a line per table."""
    from rich.table import Table as RichTable

    from dsx.bench.paper import tables

    grid = RichTable("name", "what", "where it stands", "measured by", "minutes\nfull, short")
    for table in tables.TABLES.values():
        full, short = table.measure.full_and_short_minutes
        grid.add_row(
            table.name, table.title, table.where, table.measure.kind, f"{full:g}, {short:g}"
        )
    console.print(grid)


def _measure(table: Table, run: Run) -> Samples:
    if "line" not in table.measure.kind:
        return table.measure.measure(table.rows, run)
    from dsx.bench.e2e.run import RunFailed
    from dsx.bench.testbed import TestbedUnavailable, ending

    try:
        return table.measure.measure(table.rows, run)
    except (TestbedUnavailable, RunFailed, KeyboardInterrupt) as error:
        reason, status = ending(error)
        typer.echo(f"dsx bench paper: {reason}", err=True)
        raise typer.Exit(status) from None


def show_measured(table: Table, samples: Samples, run: Run, out: Path, plot: Path | None) -> None:
    """Print the table, write its JSON and its figure."""
    from rich.console import Console

    from dsx.bench.paper import show

    show.show(table, samples, Console(width=None if Console().is_terminal else 150))
    out.write_text(json.dumps(show.as_json(table, samples, run.short), indent=1) + "\n")
    if plot is not None:
        show.plot(table, samples, plot)
    typer.echo(f"results in {out}" + (f", figure in {plot}" if plot else ""), err=True)
