"""`dsx trace`: where the time of a run went, as a table, for Perfetto, and as a picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.core.one_line_errors import one_line_errors
from dsx.telemetry.run_folder import RUN_HELP, find_run

if TYPE_CHECKING:
    from dsx.telemetry.trace.files import Timeline


@one_line_errors("trace")
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Default: trace.json in the folder.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A-B", help="The time of these steps; default: all.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw it, too; eight ranks at most.")
    ] = None,
) -> None:
    """Show where the time of a run went.

    The ranks' traces become a table, and a file for ui.perfetto.dev or chrome://tracing. The run
    records them with "trace": true in the "metrics" of its "dsx" block. With sites that share no
    file system, copy the trace.*.jsonl of all of them into one directory.
    """
    from rich.console import Console

    from dsx.telemetry.trace.files import cut, read_timeline
    from dsx.telemetry.trace.picture import draw
    from dsx.telemetry.trace.table import clock_lines, time_table

    folder = find_run(run)
    whole = read_timeline(folder)
    first, last = _read_steps(steps) if steps else whole.steps
    shown = cut(whole, first, last)
    written = _write(shown, out, folder / "trace.json")
    if picture is not None:
        draw(shown, picture)
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
    console.print(written, markup=False, soft_wrap=True)


def _write(shown: Timeline, out: Path | None, usual: Path) -> str:
    """Write the file for Perfetto; return what to say of it."""
    from dsx.telemetry.trace.chrome import write_chrome

    try:
        return f"{out or usual}: {write_chrome(shown, out or usual):,} spans"
    except OSError as error:
        if out is not None:
            raise
        return f"no file: {usual} cannot be written ({error.strerror}); --out FILE.json can"


def _read_steps(text: str) -> tuple[int, int]:
    """Read "40-60", or one number; ValueError for what is neither."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise ValueError(f"--steps {text!r} must be the first and the last step; try 40-60")
    return first, last
