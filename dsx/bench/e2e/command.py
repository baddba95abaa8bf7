"""`dsx bench e2e` on the command line.

    dsx bench e2e --ratios 32,350 --json rows.json --plot rows.png

A mistake of the user ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from dsx.bench.e2e.bench import Options
    from dsx.bench.e2e.job import Shape


@one_line_errors("bench e2e")
def e2e(
    data: Annotated[Path, typer.Option(help="A dataset of `dsx data build`.")] = Path(
        "data/stdlib"
    ),
    out: Annotated[Path, typer.Option(help="Where the runs' files go.")] = Path("runs/e2e"),
    ratios: Annotated[
        str, typer.Option(metavar="N,N", help="Seconds of an all-reduce over those of a step.")
    ] = "32,350",
    presets: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="Presets to run; default: all.")
    ] = None,
    clusters: Annotated[int, typer.Option(help="Clusters, each on a core of its own.")] = 2,
    rounds: Annotated[
        int, typer.Option(help="Rounds of a block that count, after one more that does not.")
    ] = 1,
    blocks: Annotated[
        int, typer.Option(help="Blocks of a run, with the ceiling between; medians are of blocks.")
    ] = 3,
    margin: Annotated[
        float, typer.Option(help="H steps take so many times what their transfers take.")
    ] = 1.15,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS,HIDDEN,LENGTH,BATCH",
            help="Model and batches; default: 4,64,64 with batches for about 1 Mbit/s.",
        ),
    ] = None,
    latency_ms: Annotated[
        float, typer.Option(help="Of the line, one way; the ratio is of its rate alone.")
    ] = 0.0,
    kinds: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Of gloo/none, link/none, link/curve.")
    ] = "gloo/none",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the rows there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw utilizations there.")
    ] = None,
) -> None:
    """Measure every preset on a slow line of this host.

    They are held against steps without communication and against all-reduce. Each cluster is a
    network namespace with a throttled line and runs a `deepspeed` launcher of its own on a core of
    its own. The planner chooses H. Exits with 77 where namespaces or `tc` are not to be had.
    """
    from dsx.bench.e2e.bench import Options
    from dsx.bench.kinds import parse_kinds
    from dsx.method.choices import PRESETS

    options = Options(
        out, data, clusters, read_ratios(ratios), tuple(presets.split(",") if presets else PRESETS),
        rounds, blocks, margin, _read_shape(shape), latency_ms, tuple(parse_kinds(kinds)),
    )  # fmt: skip
    require_place("--json", json_file)
    require_place("--plot", plot)
    raise typer.Exit(_measure(options, json_file, plot))


def _read_shape(text: str | None) -> Shape | None:
    from dsx.bench.e2e.job import Shape

    return None if text is None else Shape.parse(text)


def _measure(options: Options, json_file: Path | None, plot: Path | None) -> int:
    """Show and write what could be measured, whatever ended it; return the exit status."""
    from rich.console import Console

    from dsx.bench.e2e.bench import Row, measure
    from dsx.bench.e2e.run import RunFailed
    from dsx.bench.e2e.show import as_json, draw, show
    from dsx.bench.namespaces import TestbedUnavailable
    from dsx.bench.testbed import ending

    rows: list[Row] = []
    status = 0
    try:
        for row in measure(options, lambda line: typer.echo(line, err=True)):
            rows.append(row)
    except (ValueError, TestbedUnavailable, RunFailed, KeyboardInterrupt) as error:
        reason, status = ending(error)
        typer.echo(f"dsx bench e2e: {reason}", err=True)
    if rows:
        show(rows, Console(width=None if Console().is_terminal else 150))
        if json_file is not None:
            json_file.write_text(json.dumps(as_json(rows), indent=2) + "\n")
        if plot is not None:
            draw(rows, plot)
    return status


def read_ratios(text: str) -> tuple[float, ...]:
    """Read numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"ratios={text!r} must be numbers with commas between; try 32,350"
        ) from None
