"""`dsx bench telemetry` on the command line.

dsx bench telemetry --json telemetry.json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from dsx.bench.telemetry.bench import Row

Option = typer.Option


@one_line_errors("bench telemetry", RuntimeError, ModuleNotFoundError)
def telemetry(
    pairs: Annotated[int, Option(help="Of blocks, one with everything on, one off.")] = 20,
    steps: Annotated[int, Option(help="Inner steps of a block.")] = 10,
    layers: Annotated[int, Option(help="Square matrices of the model.")] = 8,
    width: Annotated[int, Option(help="Of the matrices.")] = 512,
    rows: Annotated[int, Option(help="Of that width, a step's batch.")] = 2048,
    interval: Annotated[int, Option(help="H, of four fragments.")] = 16,
    to: Annotated[
        str | None,
        Option(metavar="NAME,NAME", help="Of wandb, mlflow, tensorboard; none; default: all here."),
    ] = None,
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the rows there.")
    ] = None,
) -> None:
    """Measure what all that tells of a run costs the training thread.

    One run of two clusters over loopback. Blocks alternate between everything (records, progress,
    trace, a Prometheus page that is read every second, OpenTelemetry and notices to a server of
    this command, and those of W&B, MLflow and TensorBoard that are installed) and nothing.
    """
    from rich.console import Console

    from dsx.bench.telemetry.bench import Options, measure

    require_place("--json", json_file)
    options = Options(pairs, steps, layers, width, rows, interval, _read_names(to))
    report = measure(options, lambda line: typer.echo(line, err=True))
    console = Console(highlight=False)
    console.print(_table(report.rows))
    console.print(f"with everything on: {', '.join(report.told)}", soft_wrap=True)
    if json_file is not None:
        document = {"options": asdict(options), **asdict(report)}
        json_file.write_text(json.dumps(document, indent=2) + "\n")


def _read_names(text: str | None) -> tuple[str, ...] | None:
    if text is None or text == "none":
        return None if text is None else ()
    return tuple(name.strip() for name in text.split(","))


def _table(found: list[Row]) -> Table:
    from rich.table import Table

    from dsx.bench.telemetry.bench import CLOCKS

    table = Table(
        caption=f"CPU and wall of a step: medians of {found[0].pairs} pairs of blocks, ± half of "
        "what lies between least and most; in brackets where the median lies, to 95 %"
    )
    table.add_column("cluster")
    table.add_column("clock")
    for name in ("off, ms", "on adds, ms", "on adds, %"):
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(
            str(row.cluster), CLOCKS[row.clock], f"{row.off_ms:.2f}",
            f"{row.added_ms:.2f} \\[{row.low_ms:.2f}, {row.high_ms:.2f}]",
            f"{row.percent:.2f} ±{row.half_range_percent:.1f} "
            f"\\[{row.low_percent:.2f}, {row.high_percent:.2f}]",
        )  # fmt: skip
    return table
