"""`dsx plan`: which method, H, overlap and codec a line and a model ask for.

    dsx plan --megatron configs/qwen_107b.flags --clusters 2 --gbps 1 --gpu a800 --target 95
    dsx plan --params 7e9 --layers 32 --hidden 4096 --gpus-per-cluster 8 --step-seconds 2 \\
        --clusters 4 --gbps 0.5 --latency-ms 40
    dsx plan --from-run runs/x --latency-ms 20

A mistake of the user ends with one line on stderr and exit code 2; a target that nothing reaches
with exit code 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dsx.core.one_line_errors import one_line_errors


def _option(help: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar)


FromRun = Annotated[
    Path | None, _option("Read step, line and model from a run's metrics.dir.", "DIR")
]
Megatron = Annotated[Path | None, _option("Megatron's flags of the model.", "FILE")]
Deepspeed = Annotated[Path | None, _option("A DeepSpeed JSON, with --model for the sizes.", "FILE")]
Model = Annotated[Path | None, _option("With --deepspeed: Megatron's flags for the sizes.", "FILE")]
Params = Annotated[float | None, _option("Parameters, in place of files: 7e9.")]
Layers = Annotated[int | None, _option("With --params: layers of equal size.")]
Hidden = Annotated[int | None, _option("With --params: the width, for low rank.")]
GpusPerCluster = Annotated[
    int | None, _option("Ranks of one cluster; default: as the file plans, or tensor x pipeline.")
]
AsElsewhere = Annotated[int | None, typer.Option(hidden=True)]  # the same, as dsx dry-run has it
StepSeconds = Annotated[
    float | None, _option("Compute of one inner step, as measured in one cluster alone.")
]
Gpu = Annotated[str | None, _option("In place of it: 6 N tokens over these.", "a100|a800|h100")]
Mfu = Annotated[float | None, _option("With --gpu: the share of its peak; default 0.4.")]
TokensPerStep = Annotated[
    float | None, _option("With --gpu: of one cluster; default of flags: batch x sequence.")
]
Gbps = Annotated[float | None, _option("A cluster's line, each way, in Gbit/s, as frames count.")]
LatencyMs = Annotated[float | None, _option("One way; 0 if not given.")]
Link = Annotated[Path | None, _option("In place of both: the JSON of dsx net-test.", "FILE")]
Clusters = Annotated[int | None, _option("How many; default: as in --link, or --from-run.")]
Target = Annotated[float, _option("Percent of the time that is to be computing.")]
Codec = Annotated[
    Path | None, _option("The JSON of dsx bench codec, in place of the documented speeds.", "FILE")
]
MemoryLimit = Annotated[float | None, _option("GiB of one accelerator.")]
MaxInterval = Annotated[int, _option("The largest H to consider.")]
EgressPrice = Annotated[
    float | None, _option("Of a GB that leaves a cluster: adds what a run costs, in that money.")
]
GpuHourPrice = Annotated[float | None, _option("Of an hour of one accelerator, the same.")]
Steps = Annotated[
    float | None, _option("Inner steps of the run: days and costs are of all of it, not of a day.")
]
Mtbf = Annotated[
    float | None, _option("Hours between two losses of one cluster: adds the goodput.")
]
HealSeconds = Annotated[
    float | None, _option("With --mtbf: from a loss until that cluster trains again.")
]
SaveEvery = Annotated[
    float | None, _option("Inner steps between two saves: their time is in days and costs.")
]
SaveSeconds = Annotated[float | None, _option("With --save-every: training waits so long for one.")]
Launch = Annotated[
    Path | None, _option("The JSON of dsx bench overhead: the training thread's own work.", "FILE")
]
CodingCores = Annotated[
    int | None, _option("coding.cores: those of a rank's coding; default: as few as hide it.")
]
CoresPerRank = Annotated[
    int | None, _option("Cores of a host by its ranks: no more are planned with for coding.")
]
Top = Annotated[int | None, typer.Option(help="Presets shown; default all.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
JsonFile = Annotated[Path | None, _option("Write the JSON there, too.", "FILE")]
Plot = Annotated[Path | None, _option("Draw utilization against bandwidth there.", "FILE.png")]


@one_line_errors("plan")
def plan(
    from_run: FromRun = None,
    megatron: Megatron = None,
    deepspeed: Deepspeed = None,
    model: Model = None,
    params: Params = None,
    layers: Layers = None,
    hidden: Hidden = None,
    gpus_per_cluster: GpusPerCluster = None,
    ranks_per_cluster: AsElsewhere = None,
    step_seconds: StepSeconds = None,
    gpu: Gpu = None,
    mfu: Mfu = None,
    tokens_per_step: TokensPerStep = None,
    gbps: Gbps = None,
    latency_ms: LatencyMs = None,
    link: Link = None,
    clusters: Clusters = None,
    target: Target = 95.0,
    codec: Codec = None,
    memory_limit: MemoryLimit = None,
    max_interval: MaxInterval = 1000,
    egress_price: EgressPrice = None,
    gpu_hour_price: GpuHourPrice = None,
    steps: Steps = None,
    mtbf: Mtbf = None,
    heal_seconds: HealSeconds = None,
    save_every: SaveEvery = None,
    save_seconds: SaveSeconds = None,
    launch: Launch = None,
    coding_cores: CodingCores = None,
    cores_per_rank: CoresPerRank = None,
    top: Top = None,
    json: Json = False,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Rank the methods for a link, and print the best configuration.

    Every preset is taken at the least H, with the codec, that reach the target with least harm.
    Exits with 1 if none does, and then says what would.
    """
    from rich.console import Console

    from dsx.plan import question, show
    from dsx.plan.given import Given

    ranks = ranks_per_cluster if gpus_per_cluster is None else gpus_per_cluster
    given = Given(
        from_run, megatron, deepspeed, model, params, layers, hidden, ranks,
        step_seconds, gpu, mfu, tokens_per_step, gbps, latency_ms, link, clusters, target, codec,
        memory_limit, max_interval, egress_price, gpu_hour_price, steps, mtbf, heal_seconds,
        save_every, save_seconds, launch, coding_cores, cores_per_rank,
    )  # fmt: skip
    outputs = show.Outputs(top, json, json_file, plot)
    if not show.show_plan(question.read_question(given), outputs, Console()):
        raise typer.Exit(1)
