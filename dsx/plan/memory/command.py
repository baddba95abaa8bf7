"""`dsx memory`: what each rank will hold, before a run is started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors


@one_line_errors("memory")
def memory(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="Megatron flags, or a DeepSpeed JSON.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="With a JSON: flags of the model's sizes; default: dsx.plan's."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-cluster",
            help="Accelerators per cluster; default: as the file plans, or tensor x pipeline.",
            min=1,
        ),
    ] = None,
    ranks_as_ever: Annotated[int | None, typer.Option("--ranks", min=1, hidden=True)] = None,
    limit: Annotated[float, typer.Option(help="GiB of one accelerator.", min=0.001)] = 40.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Predict what each rank holds, and say whether it fits.

    FILE holds Megatron's flags together with the --dsx-* ones, as on the command line, or it is a
    DeepSpeed JSON with a "dsx" block. Exits with 1 if it does not fit.
    """
    from rich.console import Console

    from dsx.plan.memory.show import read_plan, show_memory

    if not show_memory(read_plan(source, model, ranks or ranks_as_ever), limit, json, Console()):
        raise typer.Exit(1)
