"""`dsx bench engines` on the command line.

dsx bench engines --only ddp,zero1-bf16,tp
"""

from __future__ import annotations

import json
import math
import tempfile
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dsx.config.files import require_place
from dsx.core.one_line_errors import one_line_errors

Option = typer.Option
_QUICK_STEPS = 40


@one_line_errors("bench engines")
def engines(
    only: Annotated[
        str | None, Option(metavar="NAME,NAME", help="Of the combinations; default: all.")
    ] = None,
    steps: Annotated[int, Option(help="Of each cluster, in each run.", min=16)] = 200,
    quick: Annotated[
        bool, Option("--quick", help=f"{_QUICK_STEPS} steps: to see that it works.")
    ] = False,
    data: Annotated[Path, Option(help="A dataset of `dsx data build`.")] = Path("data/stdlib"),
    deadline: Annotated[float, Option(help="Seconds of a run; a row has four.")] = 300.0,
    logs: Annotated[
        Path | None, Option(metavar="DIR", help="Keep what the ranks have said there.")
    ] = None,
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the rows there.")
    ] = None,
) -> None:
    """Hold the loss of each engine and layout with dsx beside that of the engine alone.

    A tiny GPT trains four times on the CPU: the engine alone; with dsx and one cluster, which has
    to come to the same bits; and in two clusters by `recommended` and by `diloco`, whose averages
    have to be the same in both, bit for bit, and near the engine's own loss. The table is in
    Markdown. Exits with 1 where any of that is not so, and says which. Ctrl-C ends it with the rows
    that there are.
    """
    from dsx.bench.engines.bench import Row, measure
    from dsx.bench.engines.combinations import parse
    from dsx.bench.engines.show import as_markdown

    require_place("--json", json_file)
    asked = parse(only)
    if not (data / "dataset.json").is_file():
        raise ValueError(
            f"--data {data} is no dataset; build one: dsx data build --from stdlib --out {data}"
        )
    count = _QUICK_STEPS if quick else steps
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() if logs is None else nullcontext(str(logs)) as folder,
        suppress(KeyboardInterrupt),  # what there is by then is shown
    ):
        measured = measure(
            asked, data, count, deadline, Path(folder), lambda line: typer.echo(line, err=True)
        )
        with closing(measured):
            for row in measured:
                rows.append(row)
    typer.echo(as_markdown(rows, count), nl=False)
    if json_file is not None:
        known = [
            {**asdict(row), "plain": _known(row.plain), "one": _known(row.one)} for row in rows
        ]
        json_file.write_text(json.dumps(known, indent=2) + "\n")
    if len(rows) < len(asked):
        typer.echo(f"ended after {len(rows)} of {len(asked)} rows", err=True)
    if len(rows) < len(asked) or any(row.wrong for row in rows):
        raise typer.Exit(1)


def _known(loss: float) -> float | None:
    """Return a loss as JSON has it: null where there is none."""
    return loss if math.isfinite(loss) else None
