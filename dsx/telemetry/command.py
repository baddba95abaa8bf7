"""`dsx report`: the records of a run as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors
from dsx.telemetry.run_folder import RUN_HELP


@one_line_errors("report", FileNotFoundError)
def report(
    run: Annotated[Path, typer.Argument(help=RUN_HELP)],
) -> None:
    """Show the records of a run as a table and a plot.

    The plot is plot.png in its folder.
    """
    from dsx.telemetry.report import report as write_report

    write_report(run)
