"""Every table by its name."""

from __future__ import annotations

import difflib

from dsx.bench.paper import co2, cocodc, dilocox, dreamddp, eager
from dsx.bench.paper.table import Table

_PAPERS = (dilocox, cocodc, eager, dreamddp, co2)
TABLES: dict[str, Table] = {table.name: table for paper in _PAPERS for table in paper.TABLES}


def find(name: str) -> Table:
    """Return a table; ValueError, with those of near names, for one that does not exist."""
    if name in TABLES:
        return TABLES[name]
    near = difflib.get_close_matches(name, TABLES, n=3, cutoff=0.5)
    hint = f"; near it: {', '.join(near)}" if near else ""
    raise ValueError(f"there is no table {name!r}{hint}; all: {', '.join(TABLES)}")


def complete(incomplete: str) -> list[str]:
    """Return the names that a shell may complete to."""
    return [name for name in TABLES if name.startswith(incomplete)]
