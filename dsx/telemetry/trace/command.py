"""`dsx trace`: where the time of a run went, as a table, for Perfetto, and as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.core.one_line_errors import one_line_errors
from dsx.core.progress import SOON, Progress, as_count
from dsx.telemetry.run_folder import RUN_HELP, find_run

if TYPE_CHECKING:
    from dsx.telemetry.trace.batch import Span, Track
    from dsx.telemetry.trace.chrome import ChromeFile
    from dsx.telemetry.trace.files import Selection, Wanted
    from dsx.telemetry.trace.table import Sums

MOST_SPANS = 2_000_000  # of a file for Perfetto, some 350 MB
_AT_A_TIME = 10_000
_MOST_RANK = 1_000_000  # nobody has more in a cluster; a slip of the finger has


@one_line_errors("trace")
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Default: trace.json in the folder.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A-B", help="The time of these steps; default: all.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The time of the last N steps.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="0,3-7", help="These of each cluster; default: all.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw it, too; eight ranks at most.")
    ] = None,
) -> None:
    """Show where the time of a run went.

    The ranks' traces become a table, and a file for ui.perfetto.dev or chrome://tracing. What is
    not asked for is not read. The run records them with "trace": true in the "metrics" of its "dsx"
    block. With sites that share no file system, copy the trace.* of all of them into one directory.
    """
    from rich.console import Console

    from dsx.telemetry.trace.files import select
    from dsx.telemetry.trace.table import clock_lines, time_table

    folder = find_run(run)
    selection = select(folder, _read_wanted(steps, last, ranks))
    count = selection.count
    if count > MOST_SPANS and (out or picture):
        raise ValueError(f"{_too_many(count)}; without --out and --picture there is a table of all")
    sums, written = _go_through(selection, out, folder / "trace.json", picture)
    console = Console(highlight=False)
    first, end = selection.steps
    lines = [
        f"steps {first} to {end}: {sums.whole:.3f} s, {len(sums.seconds)} ranks",
        *clock_lines(sums.clocks),
        *_what_lacks(selection),
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    console.print(time_table(sums))
    console.print(written, markup=False, soft_wrap=True)


def _go_through(
    selection: Selection, out: Path | None, usual: Path, picture: Path | None
) -> tuple[Sums, str]:
    """Read what is selected, rank by rank; return the sums, and what to say of the file."""
    from dsx.telemetry.trace.picture import MOST_RANKS, Timeline, draw
    from dsx.telemetry.trace.table import Sums

    sums = Sums(selection.start, selection.end)
    file, said = _begin_file(selection, out, usual)
    progress = Progress("spans", selection.count, True, first_seconds=SOON, shown=as_count)
    drawn: list[Span] = []
    with file or nullcontext():
        for number, rank in enumerate(selection.ranks):
            is_drawn = picture is not None and number < MOST_RANKS
            own: list[Span] = []
            for span in sums.pass_on(rank.rank, _counted(selection.spans(rank), progress)):
                if is_drawn or file is not None:
                    own.append(span)
            own.sort(key=_by_start)
            if file is not None:
                file.add(own)
            drawn += own if is_drawn else ()
    if picture is not None:
        drawn.sort(key=_by_start)
        draw(Timeline(drawn, selection.start, selection.end), picture)
    return sums, said or f"{out or usual}: {file.count if file else 0:,} spans"


def _begin_file(
    selection: Selection, out: Path | None, usual: Path
) -> tuple[ChromeFile | None, str]:
    """Begin the file for Perfetto, or say why there is none."""
    from dsx.telemetry.trace.chrome import ChromeFile

    if selection.count > MOST_SPANS:
        return None, f"no file: {_too_many(selection.count)}"
    try:
        return ChromeFile(out or usual, selection.start), ""
    except OSError as error:
        if out is not None:
            raise
        said = f"no file: {usual} cannot be written ({error.strerror}); --out FILE.json can"
        return None, said


def _counted(spans: Iterable[Span], progress: Progress) -> Iterator[Span]:
    for number, span in enumerate(spans, start=1):
        yield span
        if number % _AT_A_TIME == 0:
            progress.moved(_AT_A_TIME)


def _by_start(span: Span) -> tuple[int, int, Track]:
    """Sort spans: an outer one before those inside."""
    return span.start, -span.end, span.track


def _what_lacks(selection: Selection) -> list[str]:
    lines: list[str] = []
    if selection.malformed():
        lines.append(f"skipped {selection.malformed():,} spans or lines that are damaged")
    if selection.dropped():
        lines.append(f"{selection.dropped():,} spans are not there: the disk did not take them")
    if selection.left_out:
        lines.append(f"left out {selection.left_out} files of another run")
    return lines


def _too_many(count: int) -> str:
    return (
        f"{count:,} spans are more than a viewer opens ({MOST_SPANS:,}); choose with --last, "
        "--steps or --ranks"
    )


def _read_wanted(steps: str | None, last: int | None, ranks: str | None) -> Wanted:
    from dsx.telemetry.trace.files import Wanted

    if steps is not None and last is not None:
        raise ValueError(f"--steps {steps} and --last {last} are two choices; leave one out")
    return Wanted(
        None if steps is None else _read_steps(steps),
        last,
        None if ranks is None else _read_ranks(ranks),
    )


def _read_steps(text: str) -> tuple[int, int]:
    """Read "40-60", or one number; ValueError for what is neither."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise ValueError(f"--steps {text!r} must be the first and the last step; try 40-60")
    return first, last


def _read_ranks(text: str) -> frozenset[int]:
    """Read "0,3-7"; ValueError for what is no such list."""
    ranks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if low > high or high > _MOST_RANK:
            raise ValueError(
                f"--ranks {text!r} must be numbers of ranks, or from-to, with commas between; try "
                "0,3-7"
            )
        ranks.update(range(low, high + 1))
    return frozenset(ranks)
