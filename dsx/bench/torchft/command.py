"""`dsx bench torchft` on the command line.

pip install torchft
dsx bench torchft --ratio 32 --json torchft.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from dsx.bench.e2e.bench import Options, Row
    from dsx.bench.torchft.bench import Choices

Option = typer.Option


@one_line_errors("bench torchft")
def torchft(
    ratio: Annotated[
        float, Option(metavar="N", help="Seconds of an all-reduce over those of a step.")
    ] = 32.0,
    rounds: Annotated[
        int, Option(help="Rounds of a block that count, after one more that does not.")
    ] = 1,
    blocks: Annotated[
        int, Option(help="Blocks of a run, with the ceiling between; medians are of blocks.")
    ] = 3,
    interval: Annotated[int | None, Option(help="H; default: the planner's.", min=1)] = None,
    fragments: Annotated[
        int | None, Option(help="Also stream so many; goes with --delay.", min=1)
    ] = None,
    delay: Annotated[
        int | None, Option(help="Steps until a fragment's mean is applied.", min=0)
    ] = None,
    shape: Annotated[
        str | None,
        Option(metavar="LAYERS,HIDDEN,LENGTH,BATCH", help="Default: as for dsx bench e2e."),
    ] = None,
    latency_ms: Annotated[float, Option(help="Of the line, one way.")] = 0.0,
    data: Annotated[Path, Option(help="A dataset of `dsx data build`.")] = Path("data/stdlib"),
    out: Annotated[Path, Option(help="Where the runs' files go.")] = Path("runs/bench_torchft"),
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the rows there.")
    ] = None,
) -> None:
    """Measure torchft's DiLoCo beside dsx's on a slow line.

    Both train one model on the same batches, with the same optimizers and H, as in `dsx bench e2e`.
    With --fragments and --delay the streaming methods of both run, too. Exits with 77 where torchft
    is not installed, or namespaces or `tc` are not to be had.
    """
    if (fragments is None) != (delay is None):
        raise ValueError("--fragments and --delay go together, e.g. --fragments 2 --delay 8")
    require_place("--json", json_file)
    _require_torchft()
    from dsx.bench.e2e.bench import Options
    from dsx.bench.e2e.job import Shape
    from dsx.bench.torchft.bench import Choices

    size = None if shape is None else Shape.parse(shape)
    options = Options(
        out, data, ratios=(ratio,), rounds=rounds, blocks=blocks, shape=size,
        latency_milliseconds=latency_ms,
    )  # fmt: skip
    status = _measure(options, Choices(ratio, interval, fragments or 1, delay or 0), json_file)
    if status:
        raise typer.Exit(status)


def _require_torchft() -> None:
    from dsx.bench.testbed import UNAVAILABLE

    try:
        import torchft.local_sgd  # noqa: F401  # pyright: ignore
    except ImportError as error:
        typer.echo(f"dsx bench torchft: no torchft ({error}): pip install torchft", err=True)
        raise typer.Exit(UNAVAILABLE) from error


def _measure(options: Options, choices: Choices, json_file: Path | None) -> int:
    """Show and write what could be measured, whatever ended it; return the exit status."""
    from rich.console import Console

    from dsx.bench.e2e.run import RunFailed
    from dsx.bench.namespaces import TestbedUnavailable
    from dsx.bench.testbed import ending
    from dsx.bench.torchft.bench import as_json, measure, show

    rows: list[Row] = []
    status = 0
    try:
        for row in measure(options, choices, lambda line: typer.echo(line, err=True)):
            rows.append(row)
    except (ValueError, TestbedUnavailable, RunFailed, KeyboardInterrupt) as error:
        reason, status = ending(error)
        typer.echo(f"dsx bench torchft: {reason}", err=True)
    if rows:
        show(rows, Console(width=None if Console().is_terminal else 130))
        if json_file is not None:
            json_file.write_text(json.dumps([as_json(row) for row in rows], indent=2) + "\n")
    return status
