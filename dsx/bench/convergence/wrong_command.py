"""`dsx bench guard` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors


@one_line_errors("bench guard", FileNotFoundError)
def guard(
    data: Annotated[Path, typer.Option(help="A dataset of `dsx data build`.")],
    out: Annotated[
        Path, typer.Option("--json", help="The results: a row per case, as they come.")
    ] = Path("runs/guard.jsonl"),
    steps: Annotated[int, typer.Option(help="Inner steps of every run, H 8.", min=48)] = 240,
    seed: Annotated[int, typer.Option(help="Of data and model.")] = 0,
    part: Annotated[str, typer.Option(help="K/N: of the cases every N-th, from the K-th.")] = "0/1",
) -> None:
    """Train sound runs and runs that go wrong on purpose; print the guard's figures in each."""
    from dsx.bench.convergence.task import Study
    from dsx.bench.convergence.wrong import CASES, line_of, run_case

    first, _, count = part.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise typer.BadParameter(f"--part {part!r} must be K/N with K below N, such as 0/2")
    study = Study(
        data=str(data), num_clusters=4, num_steps=steps, interval=8, batch_size=4,
        sequence_length=64, num_layers=2, hidden_size=32, num_heads=2, inner_lr=8e-3,
        num_evaluations=1, validation_windows=64, device="cpu", final_rate=0.0, inner="muon",
        rest_rate=2.0,
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    for case in CASES[int(first) :: int(count)]:
        row = run_case(study, case, seed)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        typer.echo(line_of(row))
