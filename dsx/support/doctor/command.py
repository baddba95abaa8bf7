"""`dsx doctor`: one screen before a run.

Exits with 0 when nothing would stop a run, with 1 when something would, and with 2 for a mistake on
the command line or a file that cannot be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors

Config = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG]", help="A DeepSpeed JSON, or Megatron flags."),
]
Model = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With a JSON: a file of flags for the model's sizes."),
]
Ranks = Annotated[int | None, typer.Option(help="Accelerators per cluster.", min=1)]
Limit = Annotated[
    float | None, typer.Option(help="GiB of one accelerator; default: nvidia-smi's.", min=0.001)
]
Checkpoints = Annotated[
    Path, typer.Option(metavar="DIR", help="Where checkpoints are to be saved.")
]
Link = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The JSON of dsx net-test, for utilization.")
]
StepSeconds = Annotated[
    float | None, typer.Option(help="With --link: compute of one inner step.", min=1e-6)
]

Data = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="A dataset of dsx data build, or its dataset.json: once for data of all clusters, or "
        "once per cluster.",
    ),
]


@one_line_errors("doctor")
def doctor(
    config: Config = None,
    model: Model = None,
    ranks: Ranks = None,
    limit: Limit = None,
    checkpoints: Checkpoints = Path("."),
    link: Link = None,
    step_seconds: StepSeconds = None,
    data: Data = None,
) -> None:
    """Say what would stop a run, and what it will do.

    Versions, GPUs and the clock; with CONFIG also its "dsx" block, the rendezvous, disk, memory,
    data, a picture of a round, and how to launch it. Reads only. Exits with 1 if a line says STOP.
    """
    from dsx.support.doctor.screen import Given, look

    given = Given(config, model, ranks, limit, checkpoints, link, step_seconds, tuple(data or ()))
    if not look(given, typer.echo):
        raise typer.Exit(1)
