"""`dsx bench links` on the command line.

dsx bench links --lines loopback,200x2,1000 --json links.json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dsx.config.files import require_place

Option = typer.Option


def links(
    kinds: Annotated[
        str, Option(metavar="NAME,NAME", help="Transports with their security.")
    ] = "gloo/none,link/none,link/curve",
    lines: Annotated[
        str,
        Option(metavar="LINE,LINE", help="loopback, or Mbit/s; x2 behind it sends both ways."),
    ] = "loopback,200x2,1000",
    seconds: Annotated[float, Option(help="Of each window: transfer, training, both.")] = 3.0,
    repeats: Annotated[int, Option(help="Of everything, in turn; medians are of these.")] = 3,
    megabytes: Annotated[float, Option(help="Of a message.")] = 4.0,
    batch: Annotated[int, Option(help="Messages posted at once, twice over.")] = 4,
    training_windows: Annotated[
        int, Option(help="Of steps without and with a transfer beside them; 0: none.")
    ] = 1,
    rounds: Annotated[
        int, Option(help="Of factors in int4 of a small model, on each throttled line; 0: none.")
    ] = 20,
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the rows there.")
    ] = None,
) -> None:
    """Measure what the transports between clusters give and cost, side by side.

    Each measurement is two processes that send over the connections of a run: on loopback, and on
    throttled lines between two network namespaces of this host. Kinds and lines take turns, so
    that what else the machine does meets all alike. Exits with 77 where namespaces or `tc` are not
    to be had; --lines loopback needs neither.
    """
    from rich.console import Console

    from dsx.bench.kinds import parse_kinds
    from dsx.bench.links.bench import MeasurementFailed, Options, Wire, measure
    from dsx.bench.links.show import show
    from dsx.bench.namespaces import TestbedUnavailable
    from dsx.bench.testbed import ending
    from dsx.core.transport import PeerLost

    try:
        require_place("--json", json_file)
        options = Options(
            parse_kinds(kinds), [Wire.parse(line) for line in lines.split(",")], seconds, repeats,
            megabytes, batch, training_windows, rounds,
        )  # fmt: skip
        rows = measure(options, lambda line: typer.echo(line, err=True))
    except (
        TestbedUnavailable, ValueError, FileNotFoundError, MeasurementFailed, PeerLost,
        ModuleNotFoundError, KeyboardInterrupt,
    ) as error:  # fmt: skip
        reason, status = ending(error)
        typer.echo(f"dsx bench links: {reason}", err=True)
        raise typer.Exit(status) from None
    show(rows, Console())
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
