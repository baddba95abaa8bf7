"""`dsx bench cores` on the command line.

dsx bench cores --cores 1,2,4 --numel 1460000000 --fragments 4
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from rich.console import Console

    from dsx.bench.cores.bench import CoresFigures

Option = typer.Option
_UNDISTURBED = 0.9  # of its cores: what training has by itself on a host that is its own


@one_line_errors("bench cores")
def cores(
    cores: Annotated[
        str | None, Option(metavar="N,N", help="Numbers of cores; default: 1, 2, 4, ... to all.")
    ] = None,
    codecs: Annotated[
        str, Option(metavar="NAME,NAME", help="int8, int4, 2bit, or low_rank.")
    ] = "int4,low_rank",
    numel: Annotated[
        int, Option(help="Elements of a rank, in all fragments together.", min=2**12)
    ] = 2**26,
    fragments: Annotated[int, Option(help="That are under way at once.", min=1, max=256)] = 4,
    seconds: Annotated[float, Option(help="Of a window, with coding or without.", min=0.01)] = 3.0,
    repeats: Annotated[int, Option(help="The median of so many pairs of windows.", min=1)] = 5,
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Measure what a number of cores gives coding, and takes from training.

    A rank codes its launches between two clusters as in a run, with that many for `coding.cores`,
    while its training thread computes on the rest. `dsx plan --coding-cores` plans with a number.
    """
    from rich.console import Console

    from dsx.bench.cores.bench import CODECS, Asked, measure_cores
    from dsx.training.coding import cores_here

    require_place("--json", json_file)
    here, _ = cores_here()
    names = [name.strip() for name in codecs.split(",")]
    if wrong := [name for name in names if name not in CODECS]:
        raise ValueError(f"--codecs has {wrong[0]!r}; it takes {', '.join(CODECS)}")
    asked = Asked(names, numel, fragments, _numbers(cores, here), here, seconds, repeats)
    figures = measure_cores(asked)
    _show(figures, here, Console(highlight=False))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")


def _numbers(text: str | None, here: int) -> list[int]:
    """Read the numbers of cores; ValueError for more than this process may run on."""
    if text is None:
        powers = [2**i for i in range(here.bit_length())]
        return sorted({*powers, here})
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = [0]
    if not 1 <= min(found) <= max(found) <= here:
        raise ValueError(
            f"--cores {text!r} must be numbers of 1 to {here}, on which this process may run"
        )
    return found


def _show(figures: list[CoresFigures], here: int, console: Console) -> None:
    from rich.table import Table

    table = Table(caption=f"a rank of {figures[0].numel:,} elements, of {here} cores; medians")
    table.add_column("codec")
    titles = (
        "coding.\ncores", "at\nonce", "threads\neach", "s per\nlaunch", "times\nthe first",
        "core s\nper launch", "training's\nthreads", "its rate\nmeanwhile, %",
    )  # fmt: skip
    for title in titles:
        table.add_column(title, justify="right")
    first: dict[str, float] = {}
    for figure in figures:
        least = first.setdefault(figure.compression, figure.launch_seconds)
        table.add_row(
            figure.compression, str(figure.cores), str(figure.at_once), str(figure.threads),
            f"{figure.launch_seconds:.3g}", f"{least / figure.launch_seconds:.2f}",
            f"{figure.core_seconds:.3g}",
            str(figure.training_threads), f"{100 * figure.training:.0f}",
        )  # fmt: skip
    console.width = max(console.width, 110)
    console.print(table)
    had = min(figure.had for figure in figures)
    if had < _UNDISTURBED:
        console.print(
            f"the host was busy with something else: training by itself had {100 * had:.0f} % of "
            "its cores; only processor time (core s) is to be believed", soft_wrap=True,
        )  # fmt: skip
