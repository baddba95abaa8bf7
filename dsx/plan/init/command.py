"""`dsx init`: write a configuration to start from.

    dsx init ds.json
    dsx init ds.json --clusters 2 --params 7e9 --layers 32 --hidden 4096 --gpus-per-cluster 8 \\
        --step-seconds 2 --gbps 1 --latency-ms 20

What no flag tells is asked for on a terminal; elsewhere it is an error with the flags' names. A
mistake ends with one line on stderr and exit code 2. Nothing that is there is written over.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from dsx.plan.init.answers import Missing


def _option(
    help: str, metavar: str | None = None, min: int | None = None, max: int | None = None
) -> Any:
    return typer.Option(help=help, metavar=metavar, min=min, max=max)


File = Annotated[
    Path, typer.Argument(metavar="FILE", help="ds.json for DeepSpeed, run.flags for Megatron.")
]
Clusters = Annotated[int | None, _option("How many train together.")]
Rendezvous = Annotated[str | None, _option("env://, or tcp://HOST:PORT. Default: env://.")]
Params = Annotated[float | None, _option("Parameters of the model: 7e9.")]
Layers = Annotated[int | None, _option("Layers of equal size.")]
Hidden = Annotated[int | None, _option("The width, for low rank.")]
GpusPerCluster = Annotated[int | None, _option("Ranks of one cluster.")]
StepSeconds = Annotated[float | None, _option("Compute of one inner step.")]
Gpu = Annotated[str | None, _option("In place of it: estimate it for these.", "a100|a800|h100")]
TokensPerStep = Annotated[float | None, _option("With --gpu: of one cluster.")]
Gbps = Annotated[float | None, _option("A cluster's line, each way, in Gbit/s.")]
LatencyMs = Annotated[float | None, _option("One way; default: 0.")]
Link = Annotated[Path | None, _option("In place of both: the JSON of dsx net-test.", "FILE")]
Target = Annotated[float, _option("Percent of the time that is to be computing.")]
MemoryLimit = Annotated[float | None, _option("GiB of one accelerator.")]
MicroBatch = Annotated[int, _option("Of DeepSpeed: sequences of a rank.", min=1)]
Zero = Annotated[int, _option("Of DeepSpeed: the ZeRO stage.", min=0, max=3)]
Lr = Annotated[float, _option("Of DeepSpeed: the inner learning rate.", min=0)]
Bf16 = Annotated[bool, typer.Option("--bf16/--fp32", help="Of DeepSpeed: the weights' type.")]
Force = Annotated[bool, typer.Option("--force", help="Write over files that are there.")]


@one_line_errors("init")
def init(
    file: File,
    clusters: Clusters = None,
    rendezvous: Rendezvous = None,
    params: Params = None,
    layers: Layers = None,
    hidden: Hidden = None,
    gpus_per_cluster: GpusPerCluster = None,
    step_seconds: StepSeconds = None,
    gpu: Gpu = None,
    tokens_per_step: TokensPerStep = None,
    gbps: Gbps = None,
    latency_ms: LatencyMs = None,
    link: Link = None,
    target: Target = 95.0,
    memory_limit: MemoryLimit = None,
    micro_batch: MicroBatch = 1,
    zero: Zero = 1,
    lr: Lr = 3e-4,
    bf16: Bf16 = True,
    force: Force = False,
) -> None:
    """Write a configuration for a model and a line.

    The planner chooses method, H and codec. FILE.json is a DeepSpeed JSON, and beside it FILE.md
    says what each key means; FILE.flags has Megatron's flags with comments. Asks for what no flag
    tells.
    """
    import sys

    from dsx.plan.init.answers import Answers, complete
    from dsx.plan.init.config import Inner, choose
    from dsx.plan.init.files import require_new, write

    require_new(file, force)
    answers = Answers(
        clusters=clusters, rendezvous=rendezvous, params=params, layers=layers, hidden=hidden,
        gpus_per_cluster=gpus_per_cluster, step_seconds=step_seconds, gpu=gpu,
        tokens_per_step=tokens_per_step, gbps=gbps, latency_ms=latency_ms, link=link,
        target=target, memory_limit=memory_limit,
    )  # fmt: skip
    choice = choose(complete(answers, _ask if sys.stdin.isatty() else None), file.stem)
    for line in write(file, choice, Inner(micro_batch, zero, lr, bf16)):
        typer.echo(line)


def _ask(gap: Missing) -> str:
    return str(typer.prompt(gap.question, default=gap.default, err=True))
