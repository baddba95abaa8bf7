"""`dsx report`: the records of a run as a table and a picture, or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors
from dsx.telemetry.run_folder import RUN_HELP


@one_line_errors("report")
def report(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help=RUN_HELP)],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Default: plot.png in the folder.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a page in the place of table and plot."),
    ] = None,
) -> None:
    """Show the records of a run as a table and a plot, or as a page.

    The plot goes to plot.png in the run's folder, in place of the last one, or where --plot says.
    The page (--html) is one file with what was set, what happened, what cost time and what to
    change; of several runs, a comparison.
    """
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot {plot}: the figure is a PNG; give a name that ends in .png")
    if html is not None:
        from dsx.telemetry.html_report.page import write_html

        if html.suffix not in (".html", ".htm"):
            raise ValueError(f"--html {html}: the page is HTML; give a name that ends in .html")
        if plot is not None:
            raise ValueError(
                f"--plot {plot}: the page has its own charts; leave out --plot or --html"
            )
        write_html(run, html)
        typer.echo(f"page written to {html}")
        return
    if len(run) > 1:
        raise ValueError(
            f"{len(run)} runs are compared on a page: give --html FILE.html, or one run"
        )
    from dsx.telemetry.report import report as write_report

    write_report(run[0], plot)
