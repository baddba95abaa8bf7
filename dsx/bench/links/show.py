"""The table of `dsx bench links`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dsx.bench.links.bench import Row

_NUMBERS = ("Gbit/s", "core-s/GB", "% of line", "wire/payload", "steps +%")


def show(rows: Sequence[Row], console: Console) -> None:
    """Print a row per line and kind: medians, and half ranges behind ±."""
    caption = "medians ± half of what lies between least and most; core-s of both ends"
    table = Table("line", "load", "transport", caption=caption)
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    before = None
    for row in rows:
        line = "loopback" if row.line_mbit is None else f"{row.line_mbit:g}"
        line += "x2" if row.ways == 2 else ""
        if before not in (None, line):
            table.add_section()
        before = line
        table.add_row(
            line, row.load, f"{row.transport}/{row.security}",
            _with(row.gbit_per_second, row.gbit_half_range, 3),
            _with(row.cpu_seconds_per_gb, row.cpu_half_range, 2),
            _with(row.line_percent, row.line_half_range, 1),
            _with(row.wire_per_payload, row.wire_half_range, 3),
            _with(row.step_slowdown_percent, row.step_half_range, 1),
        )  # fmt: skip
    console.print(table)


def _with(value: float | None, half_range: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f} ±{half_range:.{digits}f}"
