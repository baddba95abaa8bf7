"""`dsx top`: how a run stands, in a terminal, again and again; over ssh, too."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.core.one_line_errors import one_line_errors
from dsx.telemetry.run_folder import RUN_HELP

if TYPE_CHECKING:
    from rich.console import RenderableType

_HINT = "q ends"
_MOST_EVENTS = 6


@one_line_errors("top")
def top(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)],
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    seconds: Annotated[
        float, typer.Option(help="Between two looks at the files.", min=0.2, max=3600.0)
    ] = 2.0,
) -> None:
    """Show how a run stands: a row for each cluster, and the last warnings. q or Ctrl-C ends it.

    From the run's files alone: of clusters on other hosts it shows what has been copied here.
    Where it is no terminal it prints once.
    """
    from rich.console import Console
    from rich.live import Live

    from dsx.telemetry.run_folder import find_run
    from dsx.telemetry.top.show import screen
    from dsx.telemetry.top.standing import RunFiles

    files = RunFiles(find_run(run))
    console = Console(highlight=False)

    def look(hint: str = "") -> RenderableType:
        standings, name = files.look(), files.folder.absolute().name
        return screen(name, standings, files.events(_MOST_EVENTS), console.width, hint)

    if once or not console.is_terminal:
        console.print(look())
        return
    try:
        with Live(look(_HINT), console=console, screen=True, auto_refresh=False) as live, _keys():
            while not _is_ended_within(seconds):
                live.update(look(_HINT), refresh=True)
    except KeyboardInterrupt:
        pass
    console.print(look())


@contextmanager
def _keys() -> Generator[None]:
    """Have keys arrive as they are pressed, where there are any."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_ended_within(seconds: float) -> bool:
    """Wait so long; whether a q has come meanwhile."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False
