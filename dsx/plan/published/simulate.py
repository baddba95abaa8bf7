"""`dsx simulate`: what a run across slow links will do, from a few numbers.

    dsx simulate --params 1e9 --layers 24 --step-seconds 0.1 --method streaming --gbps 1

A mistake of the user ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

from typing import Annotated, cast

import typer

from dsx.core.one_line_errors import one_line_errors

Params = Annotated[float, typer.Option(help="Parameters of the model; 1e9 for a billion.")]
Layers = Annotated[int, typer.Option(help="Layers, of equal size.")]
StepSeconds = Annotated[float, typer.Option(help="Pure compute of one inner step.")]
Method = Annotated[
    str, typer.Option(metavar="NAME", help="data_parallel, wfbp, asc_wfbp, diloco, streaming.")
]
Interval = Annotated[
    int, typer.Option(help="H: inner steps per round; data parallel sends in every step.")
]
OverlapSteps = Annotated[
    int,
    typer.Option(
        help="tau: further steps that run before one waits for a transfer; none in data parallel."
    ),
]
LayersPerFragment = Annotated[
    int, typer.Option(help="Layers sent in one launch: streaming; a bucket: wfbp.")
]
Pattern = Annotated[
    str, typer.Option(metavar="NAME", help="Streaming: a fragment's layers: strided or sequential.")
]
LaunchEvery = Annotated[
    int | None, typer.Option(help="Streaming: steps between launches; default round(H / P).")
]
Granularity = Annotated[
    str,
    typer.Option(
        metavar="layer|fragment",
        help="What leaves, and is waited for, as one: a layer (the papers), a fragment (dsx).",
    ),
]
Bits = Annotated[float, typer.Option(help="Per parameter on the wire, scales included.")]
Clusters = Annotated[
    int, typer.Option(help="C: each sends 2 (C - 1) / C times what it contributes.")
]
LatencySeconds = Annotated[float, typer.Option(help="What every launch takes beyond its bytes.")]
CodecSeconds = Annotated[
    float, typer.Option(help="Encoding and decoding, per byte of fp32: 4 bytes per parameter.")
]
Rounds = Annotated[int, typer.Option(help="Outer rounds that are simulated.")]
Targets = Annotated[
    str | None, typer.Option(metavar="PERCENT,...", help="Utilizations; default 50,80,90,95,99.")
]
Gbps = Annotated[
    float | None,
    typer.Option(help="Instead of targets and grid: a line of so many Gbit/s, each way."),
]
PaperGrid = Annotated[
    bool, typer.Option("--paper-grid", help="Answer as the papers' tables do, on their grid.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@one_line_errors("simulate")
def simulate(
    params: Params,
    layers: Layers,
    step_seconds: StepSeconds,
    method: Method,
    interval: Interval = 100,
    overlap_steps: OverlapSteps = 0,
    layers_per_fragment: LayersPerFragment = 3,
    pattern: Pattern = "strided",
    launch_every: LaunchEvery = None,
    granularity: Granularity = "layer",
    bits: Bits = 16.0,
    clusters: Clusters = 2,
    latency_seconds: LatencySeconds = 0.0,
    codec_seconds_per_byte: CodecSeconds = 0.0,
    rounds: Rounds = 20,
    targets: Targets = None,
    gbps: Gbps = None,
    paper_grid: PaperGrid = False,
    json: Json = False,
) -> None:
    """Predict the utilization on a slow link, or the link it needs.

    Compute utilization is the share of the time in which compute runs. Bandwidth is that of one
    cluster's line, each way. Figures per round are means over the simulated rounds, with the
    transfers that are left at the end.
    """
    from rich.console import Console

    from dsx.plan.published import scenario as given
    from dsx.plan.published import show

    given.require_number("overlap_steps", overlap_steps, 0, 10**6)
    remarks = _remarks(method, overlap_steps)
    sync = given.Sync(
        cast(given.MethodName, method),
        interval,
        0 if method in given.OF_EVERY_STEP else overlap_steps,
        layers_per_fragment,
        cast(given.Pattern, pattern),
        launch_every,
        cast(given.Granularity, granularity),
    )
    compute = given.Compute(params, layers, step_seconds)
    wire = given.Wire(bits, clusters, latency_seconds, codec_seconds_per_byte)
    scenario = given.Scenario(compute, sync, wire, rounds)
    if gbps is not None:
        show.show_bandwidth(scenario, gbps, remarks, json, Console())
    else:
        percents = show.read_targets(show.DEFAULT_TARGETS if targets is None else targets)
        show.show_targets(scenario, percents, paper_grid, remarks, json, Console())


def _remarks(method: str, overlap_steps: int) -> list[str]:
    from dsx.plan.published.scenario import OF_EVERY_STEP

    if method not in OF_EVERY_STEP or not overlap_steps:
        return []
    return [
        f"{method}: the next step waits for every transfer, so --overlap-steps {overlap_steps} "
        "changes nothing"
    ]
