"""`dsx bench wall-clock` on the command line.

    dsx bench wall-clock --minutes 120 --json wall_clock.json --plot wall_clock.png

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
    from dsx.bench.wall_clock.plan import Options


@one_line_errors("bench wall-clock")
def wall_clock(
    data: Annotated[Path, typer.Option(help="A dataset of `dsx data build`.")] = Path(
        "data/stdlib"
    ),
    out: Annotated[
        Path, typer.Option(help="Where parts are kept; the same command goes on there.")
    ] = Path("runs/wall_clock"),
    minutes: Annotated[
        float,
        typer.Option(help="For all runs, as planned from timed steps; other work adds to it."),
    ] = 120.0,
    shape: Annotated[
        str, typer.Option(metavar="LAYERS,HIDDEN,LENGTH,BATCH", help="Per cluster.")
    ] = "5,128,128,16",
    clusters: Annotated[int, typer.Option(help="Clusters, each on a core of its own.")] = 2,
    ratio: Annotated[
        float, typer.Option(help="Seconds of an all-reduce of fp32 gradients over a step's.")
    ] = 100.0,
    mbit: Annotated[
        float | None, typer.Option(help="The slow line, each way, in place of --ratio.")
    ] = None,
    interval: Annotated[int | None, typer.Option(help="H; default: the preset's own.")] = None,
    inner: Annotated[
        str, typer.Option(metavar="muon|adamw", help="Of data parallel and the preset alike.")
    ] = "muon",
    rates: Annotated[
        str, typer.Option(metavar="N,N", help="Inner rates to try with each, in short runs.")
    ] = "0.004,0.008,0.016,0.032",
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the curves there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the curves there.")
    ] = None,
) -> None:
    """Train one GPT three ways; show its loss by the clock and by the bytes on the line.

    DeepSpeed data parallel over all clusters without a slow line, the preset `recommended` on a
    slow line, and data parallel on that line for as long as it is given. Each cluster is a network
    namespace with a `deepspeed` launcher and a core of its own. Exits with 77 where namespaces or
    `tc` are not to be had.
    """
    from dsx.bench.e2e.job import Shape
    from dsx.bench.wall_clock.job import INNERS, Inner
    from dsx.bench.wall_clock.plan import Options

    known: dict[str, Inner] = {name: name for name in INNERS}
    if inner not in known:
        raise ValueError(f"inner={inner!r} is not known; allowed: {', '.join(INNERS)}")
    options = Options(
        out, data, minutes, Shape.parse(shape), clusters, ratio, mbit, interval, known[inner],
        read_rates(rates), seed,
    )  # fmt: skip
    require_place("--json", json_file)
    require_place("--plot", plot)
    status = _measure(options, json_file, plot)
    if status:
        raise typer.Exit(status)


def read_rates(text: str) -> tuple[float, ...]:
    """Read numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"rates={text!r} must be numbers with commas between; try 0.004,0.008,0.016"
        ) from None


def _measure(options: Options, json_file: Path | None, plot: Path | None) -> int:
    """Show and write what was measured; return the exit status."""
    from rich.console import Console

    from dsx.bench.e2e.run import RunFailed
    from dsx.bench.namespaces import TestbedUnavailable
    from dsx.bench.testbed import ending
    from dsx.bench.wall_clock.bench import measure
    from dsx.bench.wall_clock.show import draw, show

    try:
        report = measure(options, lambda line: typer.echo(line, err=True))
    except (ValueError, TestbedUnavailable, RunFailed, KeyboardInterrupt) as error:
        reason, status = ending(error)
        typer.echo(f"dsx bench wall-clock: {reason}", err=True)
        return status
    show(report, Console(width=None if Console().is_terminal else 150))
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    if plot is not None:
        draw(report, plot)
    return 0
