"""`dsx report`: the records of a run as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors
from dsx.telemetry.run_folder import RUN_HELP


@one_line_errors("report")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Default: plot.png in the folder.")
    ] = None,
) -> None:
    """Show the records of a run as a table and a plot.

    The plot goes to plot.png in the run's folder, in place of the last one, or where --plot says.
    """
    from dsx.telemetry.report import report as write_report

    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot {plot}: the figure is a PNG; give a name that ends in .png")
    write_report(run, plot)
