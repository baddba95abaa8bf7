"""`dsx watch`: a live page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors
from dsx.telemetry.run_folder import RUN_HELP


@one_line_errors("watch")
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)],
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run, drawn beside this one.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Where the page is served; 0: any that is free.", min=0, max=65535)
    ] = 8765,
    host: Annotated[
        str,
        typer.Option(help="The address it is served at; beside loopback ones, with a token."),
    ] = "127.0.0.1",
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token at a loopback address, too.")
    ] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Whether to open it in a browser.")
    ] = True,
) -> None:
    """Show a run on a live page, while it goes on and afterwards.

    RUN may come later: the page waits for it. What it shows is what the clusters write into the
    run's folder; it changes nothing. Ctrl-C ends it.
    """
    from dsx.telemetry.watch.watch import watch as serve

    def say(text: str) -> None:
        typer.echo(f"dsx watch: {text}")

    serve(run, against, (host, port), browser, token, say)
