"""The table of `dsx bench examples`: on a screen, as JSON, and as lines of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from dsx import __version__
from dsx.bench.examples.reading import Figures
from dsx.bench.examples.table import Row
from dsx.core.units import format_bytes

_COLUMNS = (
    "script", "framework", "engine", "clusters x ranks", "method", "weights",
    "samples, none shared",
    "syncs", "sent", "loss", "data parallel", "which loss",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a row: `status` is "ok", "failed" or "not run", `why` says more of the last.

    `sha256` begins that of the script that ran; `command` is what ran, `plain` without dsx.
    """

    row: Row
    status: str
    why: str = ""
    sha256: str = ""
    figures: Figures | None = None
    command: str = ""
    plain: str = ""

    @property
    def is_tested_script(self) -> bool:
        """Whether the script is the one that the row was written for."""
        return self.sha256 == self.row.sha256

    def cells(self) -> list[str]:
        """Return what stands in the table, by column."""
        row, figures = self.row, self.figures
        name = row.script.rpartition("/")[2]
        shim = f", shim {row.shim}" if row.shim else ""
        head = [
            name,
            row.framework,
            f"{row.engine}{shim}",
            f"{row.clusters} x {row.ranks}",
            row.method["preset"],
        ]
        if figures is None:
            return [*head, f"{self.status}: {self.why}", *[""] * (len(_COLUMNS) - len(head) - 1)]
        return [
            *head, "equal", f"{figures.samples:,}", str(figures.syncs),
            format_bytes(figures.sent_bytes), f"{figures.loss:.3f}", f"{figures.plain_loss:.3f}",
            row.loss_of,
        ]  # fmt: skip


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table, and a line for every row that has no results."""
    grid = RichTable(*_COLUMNS)
    for outcome in outcomes:
        if outcome.figures is not None:
            grid.add_row(*outcome.cells())
    if grid.row_count:
        console.print(grid)
    for outcome in outcomes:
        if outcome.figures is None:
            console.print(
                f"{outcome.row.name}: {outcome.status}: {outcome.why}",
                highlight=False, soft_wrap=True, markup=False,
            )  # fmt: skip
        elif not outcome.is_tested_script:
            console.print(
                f"{outcome.row.name}: another script ({outcome.sha256}) than the tested one "
                f"({outcome.row.sha256}, {outcome.row.tree.tested})",
                highlight=False, soft_wrap=True, markup=False,
            )  # fmt: skip


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the table for a page."""
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line(outcome.cells()) for outcome in outcomes]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def versions(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return the versions of what the rows need, and of dsx."""
    names = {name for outcome in outcomes for name in outcome.row.packages}
    found = {name: metadata.version(name) for name in ("torch", *sorted(names)) if _is_there(name)}
    return {"dsx": __version__, **found}


def _is_there(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def as_json(outcomes: Sequence[Outcome], date: str) -> Mapping[str, Any]:
    """Return everything as plain values."""
    rows = [
        {
            "name": one.row.name, "framework": one.row.framework, "script": one.row.script,
            "tree": asdict(one.row.tree), "engine": one.row.engine, "clusters": one.row.clusters,
            "ranks": one.row.ranks, "method": dict(one.row.method), "shim": one.row.shim,
            "status": one.status, "why": one.why, "sha256": one.sha256,
            "is_tested_script": one.is_tested_script, "loss_of": one.row.loss_of,
            "command": one.command, "plain_command": one.plain,
            **({} if one.figures is None else asdict(one.figures)),
        }
        for one in outcomes
    ]  # fmt: skip
    return {"date": date, "versions": versions(outcomes), "rows": rows}
