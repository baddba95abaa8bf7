"""`dsx trace`: where the time of a run went, as a table, for Perfetto, and as a picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer


def trace(
    run_dir: Annotated[Path, typer.Argument(help="The directory that metrics.dir names.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Default: RUN_DIR/trace.json.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A-B", help="The time of these steps; default: all.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw it, too; eight ranks at most.")
    ] = None,
) -> None:
    """Put the ranks' traces together: a table, and a file for ui.perfetto.dev or chrome://tracing.

    The run records them with "trace": true in the "metrics" of its "dsx" block. With sites that
    share no file system, copy the trace.*.jsonl of all of them into one directory.
    """
    from rich.console import Console

    from dsx.telemetry.trace.chrome import write_chrome
    from dsx.telemetry.trace.files import cut, read_timeline
    from dsx.telemetry.trace.picture import draw
    from dsx.telemetry.trace.table import clock_lines, time_table

    out = out or run_dir / "trace.json"
    try:
        whole = read_timeline(run_dir)
        first, last = _read_steps(steps) if steps else whole.steps
        shown = cut(whole, first, last)
        count = write_chrome(shown, out)
        if picture is not None:
            draw(shown, picture)
    except (ValueError, OSError) as error:
        typer.echo(f"dsx trace: {error}", err=True)
        raise typer.Exit(2) from error
    console = Console(highlight=False)
    seconds = (shown.end - shown.start) / 1e6
    lines = [
        f"steps {first} to {last}: {seconds:.3f} s, {len(shown.ranks)} ranks",
        *clock_lines(whole),
    ]
    if whole.malformed:
        lines.append(f"skipped {whole.malformed} lines that are no records")
    if whole.left_out:
        lines.append(f"left out {whole.left_out} files of another run")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    console.print(time_table(shown))
    console.print(f"{out}: {count:,} spans", markup=False, soft_wrap=True)


def _read_steps(text: str) -> tuple[int, int]:
    """Read "40-60", or one number; ValueError for what is neither."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise ValueError(f"--steps {text!r} must be the first and the last step; try 40-60")
    return first, last
