"""`dsx bench start` on the command line.

dsx bench start --sizes 2x8,2x32,4x8,4x32 --to 8x1024
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsx.comm.links.extra import require_extra
from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors

Option = typer.Option


@one_line_errors("bench start", RuntimeError)
def start(
    sizes: Annotated[
        str, Option(metavar="CxN,CxN", help="Clusters and ranks of each; one process per rank.")
    ] = "2x1,2x2,4x2,2x8,4x8,2x32,8x8,4x32",
    to: Annotated[
        str, Option(metavar="CxN,CxN", help="What to extrapolate to.")
    ] = "8x64,8x256,8x1024",
    rtt_ms: Annotated[
        float, Option(help="Between sites, there and back, for the extrapolation.", min=0)
    ] = 50.0,
    transport: Annotated[
        Literal["gloo", "link"], Option(help="What moves messages; links have keys.")
    ] = "gloo",
    repeats: Annotated[
        int, Option(help="Of starts of up to 4 ranks; the least counts.", min=1)
    ] = 20,
    model_file: Annotated[
        Path | None, Option("--model", metavar="FILE", help="Write the fitted model there.")
    ] = None,
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the rows and the model there.")
    ] = None,
) -> None:
    """Start runs of several sizes with all their processes, and fit what larger ones would take.

    A run's own start, on loopback, with a small model: from dsx.init_distributed until all
    connections stand. All ranks share this host's cores, so processor time is measured, and
    requests are counted: to torch's stores as the kernel has sent them.
    """
    from rich.console import Console

    from dsx.bench.start.bench import Options, hash_rate, measure, this_host
    from dsx.bench.start.show import show, show_fit, show_sizes
    from dsx.plan.start_time import fit, require_sizes

    require_place("--json", json_file)
    require_place("--model", model_file)
    options = Options(require_sizes("--sizes", sizes), repeats, over_links=transport == "link")
    wanted = require_sizes("--to", to)
    if options.over_links:
        require_extra()
    rows = measure(options, lambda line: typer.echo(line, err=True))
    console = Console()
    show(rows, console)
    command = f"dsx bench start --transport {transport} --sizes {sizes}"
    model = fit(rows, hash_rate(), command, this_host())
    show_fit(rows, model, console)
    show_sizes(wanted, rtt_ms / 1e3, model, console)
    if model_file is not None:
        model_file.write_text(model.write())
    if json_file is not None:
        found = {"rows": [asdict(row) for row in rows], "model": asdict(model)}
        json_file.write_text(json.dumps(found, indent=2) + "\n")
