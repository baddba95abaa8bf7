"""`dsx bench examples` on the command line.

    dsx bench examples                                  # the rows, and the sources that they need
    dsx bench examples --examples ~/trees --only run_clm,nanogpt --json examples.json

A mistake of the user ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from dsx.bench.examples.show import Outcome
    from dsx.bench.examples.table import Row

Option = typer.Option


@one_line_errors("bench examples")
def examples(
    trees: Annotated[
        Path | None,
        Option("--examples", metavar="DIR", help="Where the projects' sources are, by name."),
    ] = None,
    only: Annotated[
        str | None, Option(metavar="NAME,NAME", help="Rows whose names begin so; default: all.")
    ] = None,
    out: Annotated[Path, Option(help="Where data and runs go.")] = Path("runs/bench_examples"),
    timeout: Annotated[float, Option(help="Seconds of one run.", min=1)] = 600.0,
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the rows there.")
    ] = None,
    markdown: Annotated[
        Path | None, Option(metavar="FILE", help="Write the table there, as Markdown.")
    ] = None,
) -> None:
    """Train other projects' own scripts across clusters, beside data parallel training.

    Each script runs as it is, on CPUs, with local data and no network: under dsx.run in clusters on
    this host, and by itself in one world of as many ranks. At the end the clusters' weights have to
    be the same bits, and no sample may have been read by two of them. Without --examples the rows
    are listed. Exits with 1 if a row has failed, else with 77 if one could not run.
    """
    from rich.console import Console

    from dsx.bench.examples.show import show

    rows = _chosen(only)
    if trees is None:
        _list(rows, Console())
        return
    if not trees.is_dir():
        raise ValueError(f"--examples={trees} is not a directory")
    require_place("--json", json_file)
    require_place("--markdown", markdown)
    outcomes = _run(rows, trees.absolute(), out.absolute(), timeout)
    show(outcomes, Console(width=None if Console().is_terminal else 170))
    _write(outcomes, json_file, markdown)
    failed = {outcome.status for outcome in outcomes}
    if failed != {"ok"}:
        raise typer.Exit(1 if "failed" in failed else 77)


def _run(rows: Sequence[Row], trees: Path, out: Path, timeout: float) -> list[Outcome]:
    from dsx.bench.examples.run import run_row

    outcomes: list[Outcome] = []
    for number, row in enumerate(rows, start=1):
        head = f"[{number}/{len(rows)}] {row.name}"

        def tell(what: str, head: str = head) -> None:
            typer.echo(f"{head}: {what}", err=True)

        outcomes.append(run_row(row, trees, out, timeout, tell))
        tell(outcomes[-1].status)
    return outcomes


def _chosen(only: str | None) -> list[Row]:
    """Return rows by the beginnings of their names; ValueError for one that none has."""
    from dsx.bench.examples.rows import ROWS

    if only is None:
        return list(ROWS)
    begins = only.split(",")
    for begin in begins:
        if not begin or not any(row.name.startswith(begin) for row in ROWS):
            names = ", ".join(row.name for row in ROWS)
            raise ValueError(f"--only={only}: no row begins with {begin!r}; there are {names}")
    return [row for row in ROWS if row.name.startswith(tuple(begins))]


def _list(rows: Sequence[Row], console: Console) -> None:
    """Print a line per row, and one per tree."""
    from rich.table import Table as RichTable

    grid = RichTable("name", "script", "engine", "clusters x ranks")
    for row in rows:
        script = f"{row.tree.name}/{row.file}"
        grid.add_row(row.name, script, row.engine, f"{row.clusters} x {row.ranks}")
    console.print(grid)
    console.print("--examples DIR, in which the sources are:", highlight=False)
    for tree in {row.tree: None for row in rows}:
        console.print(f"  {tree.how}", highlight=False, soft_wrap=True, markup=False)


def _write(outcomes: Sequence[Outcome], json_file: Path | None, markdown: Path | None) -> None:
    import datetime

    from dsx.bench.examples.show import as_json, as_markdown

    if json_file is not None:
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        json_file.write_text(json.dumps(as_json(outcomes, date), indent=1) + "\n")
    if markdown is not None:
        markdown.write_text(as_markdown(outcomes))
