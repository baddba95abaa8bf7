"""`dsx bench convergence` on the command line.

    dsx data build --from stdlib --out data/stdlib
    dsx bench convergence --json runs/convergence/results.json
    dsx bench convergence --presets diloco,eager+int4 --seeds 0 --steps 5000 \\
        --settings runs/convergence/results.json --json long.json
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors

Option = typer.Option


@one_line_errors("bench convergence", OSError)
def convergence(
    data: Annotated[Path, Option(help="A dataset of `dsx data build`.")] = Path("data/stdlib"),
    presets: Annotated[
        str | None,
        Option(metavar="NAME[+CODEC],...", help="What to compare; default: every preset."),
    ] = None,
    clusters: Annotated[int, Option(help="C, all in one process.", min=2)] = 4,
    steps: Annotated[int, Option(help="Inner steps of every run.", min=1)] = 800,
    interval: Annotated[int, Option(help="H.", min=1)] = 20,
    batch_size: Annotated[int, Option(help="Windows per cluster and step.", min=1)] = 4,
    sequence_length: Annotated[int, Option(help="Tokens of a window.", min=1)] = 64,
    layers: Annotated[int, Option(help="Of the model.", min=1)] = 4,
    hidden: Annotated[int, Option(help="Width of the model.", min=1)] = 64,
    heads: Annotated[int, Option(help="Of attention.", min=1)] = 4,
    inner_lr: Annotated[float, Option(help="Learning rate of the inner AdamW.")] = 3e-3,
    rates: Annotated[
        str, Option(metavar="LR,LR", help="Outer learning rates to choose from.")
    ] = "0.25,0.5,1",
    momenta: Annotated[
        str, Option(metavar="MU,MU", help="Outer momenta to choose from.")
    ] = "0,0.5",
    seeds: Annotated[
        str, Option(metavar="N,N", help="Runs of each; the first one is tuned with.")
    ] = "0,1,2",
    evaluations: Annotated[int, Option(help="Validations along each run.", min=1)] = 10,
    validation_windows: Annotated[int, Option(help="Windows of a validation.", min=1)] = 512,
    settings: Annotated[
        Path | None,
        Option(metavar="FILE", help="An earlier study's JSON: take its choices, do not tune."),
    ] = None,
    jobs: Annotated[
        int | None, Option(help="Runs at a time, one thread each; default: one a core.", min=1)
    ] = None,
    device: Annotated[str, Option(help="Of models and data.")] = "cpu",
    json_file: Annotated[Path, Option("--json", metavar="FILE", help="The results.")] = Path(
        "runs/convergence/results.json"
    ),
    plot: Annotated[
        Path | None, Option(metavar="FILE.png", help="Default: beside the results.")
    ] = None,
) -> None:
    """Measure what each method loses against data parallel.

    C clusters in one process train the quickstart's kind of model on real text, from the same
    weights and on the same batches, under every preset. Outer learning rate and momentum are tuned
    for each preset on one grid, the same for all, with the first seed; the choice then runs with
    every seed. The baseline is one model that takes the mean gradient of all clusters' batches in
    every step.

    NAME+CODEC is a preset with its pseudo-gradients sent in another format, at the rate and
    momentum of the preset without it. Results appear as a table, as JSON (an object per preset and
    seed) and as a plot. Finished runs are kept beside the JSON file and not run again.
    """
    from dsx.bench.convergence import study

    shared = study.Study(
        str(data), clusters, steps, interval, batch_size, sequence_length, layers, hidden, heads,
        inner_lr, evaluations, validation_windows, device,
    )  # fmt: skip
    search = study.Search(
        study.read_presets(presets),
        study.read_numbers("--rates", rates, float),
        study.read_numbers("--momenta", momenta, float),
        study.read_numbers("--seeds", seeds, int),
        settings,
    )
    study.compare(shared, search, jobs or os.cpu_count() or 1, json_file, plot)
