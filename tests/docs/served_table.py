"""Pages that print a table of what is served: it is that of the code, or is written anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

BEGIN, END = "<!-- served: begin -->\n", "<!-- served: end -->\n"


def require_table(page: Path, first: str, table: Sequence[tuple[str, str, str]]) -> None:
    """Compare a page's table with the code's, whose `first` column is named so.

    `DSX_WRITE_DOCS=1` writes it.
    """
    rows = [(first, "dsx", ""), ("---", "---", "---")]
    rows += [(f"`{name}`", *rest) for name, *rest in table]
    wanted = "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"
    before, rest = page.read_text().split(BEGIN)
    now, after = rest.split(END)
    if os.environ.get("DSX_WRITE_DOCS"):
        page.write_text(before + BEGIN + wanted + END + after)
        return
    assert now == wanted, "write it anew: DSX_WRITE_DOCS=1 pytest tests/docs"


def require_once(table: Sequence[tuple[str, str, str]]) -> None:
    """Each name has one row."""
    names = [name for name, *_ in table]
    assert len(names) == len(set(names))
