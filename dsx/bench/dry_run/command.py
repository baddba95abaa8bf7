"""`dsx dry-run`: build the ranks of a run without its machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dsx.core.one_line_errors import one_line_errors


def _option(help: str, metavar: str | None = None, min: float | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar, min=min)


Source = Annotated[
    Path, typer.Argument(metavar="FILE", help="Megatron flags, or a DeepSpeed JSON.")
]
Model = Annotated[
    Path | None, _option("With a JSON: flags of the model's sizes; default: dsx.plan's.")
]
Clusters = Annotated[int | None, _option("How many, in place of the file's.", min=1)]
RanksPerCluster = Annotated[
    int | None,
    _option("Accelerators per cluster; default: as the file plans, or tensor x pipeline.", min=1),
]
Build = Annotated[
    str | None,
    _option(
        "Whose pipeline stages to build, as 0,39,79; default the first, a middle and the last "
        "stage.",
        "RANKS",
    ),
]
StepSeconds = Annotated[float | None, _option("Compute of one inner step, for the utilization.")]
Gpu = Annotated[
    str | None, _option("In place of it: the step's arithmetic; default a800.", "a100|a800|h100")
]
Mfu = Annotated[float | None, _option("With it: the share of its peak; default 0.4.")]
Gbps = Annotated[
    float | None, _option("A cluster's line, each way, in Gbit/s, as frames count; default 1.")
]
LatencyMs = Annotated[float | None, _option("One way; default 20.")]
DiskMbS = Annotated[
    float | None, _option("What one rank writes per second, in MB; default 500.", min=1e-3)
]
Json = Annotated[Path | None, _option("Write JSON there.", "FILE")]


@one_line_errors("dry-run")
def dry_run(
    source: Source,
    model: Model = None,
    clusters: Clusters = None,
    ranks_per_cluster: RanksPerCluster = None,
    build: Build = None,
    step_seconds: StepSeconds = None,
    gpu: Gpu = None,
    mfu: Mfu = None,
    gbps: Gbps = None,
    latency_ms: LatencyMs = None,
    disk_mb_s: DiskMbS = None,
    json: Json = None,
) -> None:
    """Build a run's ranks without memory or network, and say what they come to.

    The engine's own model and optimizer are built on tensors that take no memory, with dsx attached
    as in the run. A configuration that a run would refuse is refused here, in the same words. What
    seconds depend on and no option tells is assumed, and said.
    """
    import json as format
    import os

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # engines ask fakes for their addresses
    from rich.console import Console

    from dsx.bench.dry_run.asked import Asked
    from dsx.bench.dry_run.dry_run import build as build_run
    from dsx.bench.dry_run.show import show
    from dsx.config.files import require_place

    require_place("--json", json)
    asked = Asked(
        source, model, clusters, ranks_per_cluster, _ranks(build), step_seconds, gbps, latency_ms,
        disk_mb_s, gpu, mfu,
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
