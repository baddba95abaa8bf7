"""`dsx bench convergence` on the command line.

    dsx data build --from stdlib --out data/stdlib
    dsx bench convergence --json runs/convergence/results.json
    dsx bench convergence --presets diloco,eager+int4 --seeds 0 --steps 5000 \\
        --settings runs/convergence/results.json --json long.json
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from dsx.bench.convergence.study import Search
    from dsx.bench.convergence.task import Inner, Study
    from dsx.data.shards import Shards

Option = typer.Option
Data = Annotated[Path, Option(help="A dataset of `dsx data build`.")]
Presets = Annotated[
    str | None,
    Option(
        metavar="NAME[+CODEC][+VARIANT],...",
        help="What to compare; default: every preset. +CODEC sends pseudo-gradients in another "
        "format, tuned without; +shift keeps the progress of a period that a preset is late, "
        "+serial sends a fragment at a time; +embeddings averages all gradients but those of "
        "layers' matrices in every step, +moments what inner optimizers keep in every H, +begun "
        "all gradients in the first twentieth, each exact and counted; +moments_2bit first moments "
        "in 2 bit, +slow has Muon remember for longer, and averages that; +growing has H grow as "
        "the inner rate falls, +gain moves the outer rate and +tested H by what the guard sees; "
        "+bf16_momentum, +bf16_residual and +int8_residual keep outer state in fewer bits; "
        "snoo is data parallel with outer Nesterov steps.",
    ),
]
Clusters = Annotated[int, Option(help="Clusters, all in one process.", min=2)]
Steps = Annotated[int, Option(help="Inner steps of every run.", min=1)]
Interval = Annotated[int, Option(help="H, the steps between outer steps.", min=1)]
BatchSize = Annotated[int, Option(help="Windows per cluster and step.", min=1)]
SequenceLength = Annotated[int, Option(help="Tokens of a window.", min=1)]
Layers = Annotated[int, Option(help="Of the model.", min=1)]
Hidden = Annotated[int, Option(help="Width of the model.", min=1)]
Heads = Annotated[int, Option(help="Of attention.", min=1)]
InnerLr = Annotated[
    str | None,
    Option(
        metavar="LR,LR",
        help="Of the inner optimizer; of several, data parallel's best [default: that of "
        "--settings, or 1.5e-3,3e-3,6e-3].",
    ),
]
InnerRule = Annotated[
    str, Option(metavar="adamw|muon", help="muon: matrices by Muon, the rest by AdamW.")
]
RestRate = Annotated[
    str | None,
    Option(
        metavar="X,X",
        help="Rate of embeddings, head and vectors, in that of matrices [default: that of "
        "--settings, or 1,2].",
    ),
]
OwnLr = Annotated[
    str,
    Option(metavar="X,X", help="A preset's own inner rate, in data parallel's, to choose from."),
]
OwnRest = Annotated[
    str, Option(metavar="X,X", help="The same of embeddings, head and vectors, beside that of all.")
]
OwnDecay = Annotated[str, Option(metavar="X,X", help="The same of the weight decay.")]
WeightDecay = Annotated[float, Option(help="Of the inner optimizer.", min=0.0)]
MuonMomentum = Annotated[float, Option(help="Of --inner muon.", min=0.0, max=0.999)]
FinalRate = Annotated[
    float, Option(help="What the rate's cosine ends at, in its largest.", min=0.0, max=1.0)
]
Rates = Annotated[str, Option(metavar="LR,LR", help="Outer learning rates to choose from.")]
Momenta = Annotated[str, Option(metavar="MU,MU", help="Outer momenta to choose from.")]
Seeds = Annotated[str, Option(metavar="N,N", help="Runs of each; the first one is tuned with.")]
Evaluations = Annotated[int, Option(help="Validations along each run.", min=1)]
ValidationWindows = Annotated[int, Option(help="Windows of a validation.", min=1)]
Problem = Annotated[
    str,
    Option(
        help="What is trained: causal or masked language modelling, or images: a ResNet of "
        "--layers blocks, a multiple of 3, and --hidden channels names the digits of scikit-learn."
    ),
]
Settings = Annotated[
    Path | None,
    Option(metavar="FILE", help="An earlier study's JSON: take its choices, do not tune."),
]
Target = Annotated[
    float | None,
    Option(metavar="LOSS", help="Count steps and bytes to it; default: the least all runs reach."),
]
Jobs = Annotated[
    int | None, Option(help="Runs at a time, one thread each; default: one a core.", min=1)
]
ShardsOf = Annotated[
    str,
    Option(
        metavar="iid|contiguous|skewed",
        help="Whether clusters read the like, a stretch each, or a kind each.",
    ),
]
Sizes = Annotated[
    str | None,
    Option(metavar="LxWxH,...", help="Layers x width x heads of several models: the trend."),
]
QkNorm = Annotated[bool, Option("--qk-norm", help="Normalise queries and keys.")]
ZLoss = Annotated[float, Option(help="Weight of log(Z)^2 in the training's loss.", min=0.0)]
Compile = Annotated[
    bool, Option("--compile", help="Models by torch.compile, which needs a C++ compiler on a CPU.")
]
Device = Annotated[str, Option(help="Of models and data.")]
JsonFile = Annotated[
    Path,
    Option(
        "--json",
        metavar="FILE",
        show_default=False,
        help="The results; default: results.json in runs/convergence.",
    ),
]
Plot = Annotated[Path | None, Option(metavar="FILE.png", help="Default: beside the results.")]


@one_line_errors("bench convergence")
def convergence(
    data: Data = Path("data/stdlib"),
    presets: Presets = None,
    clusters: Clusters = 4,
    steps: Steps = 800,
    interval: Interval = 20,
    batch_size: BatchSize = 4,
    sequence_length: SequenceLength = 64,
    layers: Layers = 4,
    hidden: Hidden = 64,
    heads: Heads = 4,
    sizes: Sizes = None,
    inner_lr: InnerLr = None,
    inner: InnerRule = "adamw",
    rest_rate: RestRate = None,
    final_rate: FinalRate = 0.1,
    weight_decay: WeightDecay = 0.1,
    muon_momentum: MuonMomentum = 0.95,
    own_lr: OwnLr = "1",
    own_rest: OwnRest = "1",
    own_decay: OwnDecay = "1",
    rates: Rates = "0.25,0.5,1",
    momenta: Momenta = "0,0.5",
    seeds: Seeds = "0,1,2",
    evaluations: Evaluations = 10,
    validation_windows: ValidationWindows = 512,
    shards: ShardsOf = "iid",
    problem: Problem = "causal",
    qk_norm: QkNorm = False,
    z_loss: ZLoss = 0.0,
    settings: Settings = None,
    target_loss: Target = None,
    jobs: Jobs = None,
    device: Device = "cpu",
    compile_models: Compile = False,
    json_file: JsonFile = Path("runs/convergence/results.json"),
    plot: Plot = None,
) -> None:
    """Measure what each method loses against data parallel.

    C clusters in one process train the quickstart's kind of model on real text, from the same
    weights and batches, under every preset. Outer rate and momentum, and --own-lr, --own-rest and
    --own-decay, are tuned for each preset on one grid with the first seed; the choice runs with
    every seed. Data parallel, one model on all clusters' batches, is tuned on the product of
    --inner-lr and --rest-rate; its best is for all. With --sizes every size is trained, at the
    rates of the first. Finished runs are kept and not run again.
    """
    from dsx.bench.convergence import study
    from dsx.bench.convergence.task import Study

    shared = Study(
        str(data), clusters, steps, interval, batch_size, sequence_length, layers, hidden, heads,
        0.0, evaluations, validation_windows, device, cast("Shards", shards),
        problem=problem, qk_norm=qk_norm, z_loss=z_loss,
        inner=cast("Inner", inner), final_rate=final_rate,
        compiled=compile_models, weight_decay=weight_decay, muon_momentum=muon_momentum,
    )  # fmt: skip
    owns = study.read_owns(own_lr, own_rest, own_decay)
    search = study.read_search(presets, rates, momenta, seeds, settings, inner_lr, rest_rate, owns)
    _compare(shared, search, jobs or os.cpu_count() or 1, json_file, plot, target_loss, sizes)


def _compare(
    shared: Study,
    search: Search,
    jobs: int,
    out: Path,
    figure: Path | None,
    target: float | None,
    sizes: str | None,
) -> None:
    from dsx.bench.convergence.sizes import compare_sizes, read_sizes
    from dsx.bench.convergence.study import compare

    if sizes is None:
        compare(shared, search, jobs, out, figure, target)
        return
    if target is not None:
        raise ValueError(f"--target-loss {target:g} has no part in --sizes; leave it out")
    compare_sizes(shared, read_sizes(sizes), search, jobs, out, figure)
