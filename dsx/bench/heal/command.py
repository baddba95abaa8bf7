"""`dsx bench heal` on the command line.

dsx bench heal --mbit 200 --json heal.json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dsx.config.files import require_place

Option = typer.Option


def heal(
    mbit: Annotated[float, Option(help="Of each cluster's line, each way.")] = 200.0,
    clusters: Annotated[int, Option(help="3 or 4, a process each.")] = 3,
    layers: Annotated[int, Option(help="Square matrices, a fragment each.")] = 8,
    width: Annotated[int, Option(help="Of the matrices.")] = 1024,
    interval: Annotated[int, Option(help="H.")] = 32,
    step_seconds: Annotated[
        float, Option(help="That a step computes, as on a GPU: mostly asleep.")
    ] = 0.25,
    repeats: Annotated[int, Option(help="Of each way to be back; medians are of these.")] = 3,
    heal_rate_mbit: Annotated[
        float | None, Option(help="`link.heal_rate_mbit` of the run; default: the line's.")
    ] = None,
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the rows there.")
    ] = None,
) -> None:
    """Kill one of some clusters on slow lines, start it again, and see what that costs.

    It comes back once without and once with a checkpoint of its own; beside that, all are killed
    and start from the checkpoint. What the others' training threads lose meanwhile is measured by
    their clocks. Exits with 77 where namespaces or `tc` are not to be had.
    """
    from rich.console import Console

    from dsx.bench.e2e.run import RunFailed
    from dsx.bench.heal.bench import Options, measure
    from dsx.bench.heal.show import show
    from dsx.bench.namespaces import TestbedUnavailable
    from dsx.bench.testbed import ending

    try:
        require_place("--json", json_file)
        options = Options(
            mbit, clusters, layers, width, interval, step_seconds, repeats, heal_rate_mbit
        )
        rows = measure(options, lambda line: typer.echo(line, err=True))
    except (
        TestbedUnavailable, ValueError, FileNotFoundError, RunFailed, ModuleNotFoundError,
        KeyboardInterrupt,
    ) as error:  # fmt: skip
        reason, status = ending(error)
        typer.echo(f"dsx bench heal: {reason}", err=True)
        raise typer.Exit(status) from None
    show(options, rows, Console())
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
