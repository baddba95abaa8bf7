"""The table of `dsx bench heal`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from dsx.bench.heal.bench import Options, Row

_COLUMNS = ("copied MB", "there MB", "line s", "healed s", "back s", "others lose", "longest s")


def show(options: Options, rows: Sequence[Row], console: Console) -> None:
    """Print a row per way to be back."""
    table = Table(
        Column("a cluster", no_wrap=True),
        title=f"{options.num_elements / 1e6:.1f} M parameters, {options.num_clusters} clusters, "
        f"{options.mbit:g} Mbit/s each way, H {options.interval}, steps of "
        f"{options.step_seconds:g} s",
        caption="line s: what the line takes for what was copied; back s: from the start of the "
        "process to the first step with it; longest s: of the others' steps, beyond any before",
    )
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.way, f"{row.copied_mb:.1f}", f"{row.held_mb:.1f}", f"{row.line_seconds:.1f}",
            f"{row.heal_seconds:.1f}", f"{row.total_seconds:.1f}",
            "" if row.lost_percent is None else f"{row.lost_percent:.2f} %",
            "" if row.longest_seconds is None else f"{row.longest_seconds:.2f}",
        )  # fmt: skip
    console.print(table)
