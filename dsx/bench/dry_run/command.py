"""`dsx dry-run`: build the ranks of a run without its machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors


@one_line_errors("dry-run")
def dry_run(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="Megatron flags, or a DeepSpeed JSON.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="With a JSON: flags of the model's sizes; default: dsx.plan's."),
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="How many, in place of the file's.", min=1)
    ] = None,
    ranks_per_cluster: Annotated[
        int | None,
        typer.Option(
            help="Accelerators per cluster; default: as the file plans, or tensor x pipeline.",
            min=1,
        ),
    ] = None,
    build: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS",
            help="Whose pipeline stages to build, as 0,39,79; default the first, a middle and "
            "the last stage.",
        ),
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(help="Compute of one inner step, for the utilization.")
    ] = None,
    gbps: Annotated[
        float | None, typer.Option(help="A cluster's line, each way, in Gbit/s, as frames count.")
    ] = None,
    latency_ms: Annotated[float, typer.Option(help="With --gbps: one way.", min=0)] = 0.0,
    disk_mb_s: Annotated[
        float | None, typer.Option(help="What one rank writes per second, in MB.", min=1e-3)
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JSON there.")] = None,
) -> None:
    """Build a run's ranks without memory or network, and say what they come to.

    The engine's own model and optimizer are built on tensors that take no memory, with dsx attached
    as in the run. A configuration that a run would refuse is refused here, in the same words.
    """
    import json as format
    import os

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # engines ask fakes for their addresses
    from rich.console import Console

    from dsx.bench.dry_run.dry_run import Asked
    from dsx.bench.dry_run.dry_run import build as build_run
    from dsx.bench.dry_run.show import show
    from dsx.config.files import require_place

    require_place("--json", json)
    asked = Asked(
        source, model, clusters, ranks_per_cluster, _ranks(build), step_seconds, gbps, latency_ms,
        disk_mb_s,
    )  # fmt: skip
    run = build_run(asked)
    show(run, Console())
    if json is not None:
        json.write_text(format.dumps(run.record(), indent=2) + "\n")


def _ranks(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--build {text!r} must be numbers of ranks; write 0,39,79") from None
