"""The tables of docs/monitoring.md are those of the code; `DSX_WRITE_DOCS=1` writes them."""

from __future__ import annotations

import re

from dsx.telemetry.figures import FIGURES, LABELS
from tests.docs.pages import hold


def table(head: str, rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, re.sub(r"[^|]+", " --- ", head), *lines, ""])


def figures() -> str:
    rows = [
        [f"`{f.name}`", f.kind, ", ".join(f"`{label}`" for label in f.labels), f.meaning]
        for f in FIGURES
    ]
    return table("| name | kind | labels beside `cluster` | meaning |", rows)


def labels() -> str:
    return table("| label | values |", [[f"`{name}`", text] for name, text in LABELS.items()])


def test_the_tables_are_those_of_the_code() -> None:
    for name, wanted in (("figures", figures()), ("labels", labels())):
        hold("docs/monitoring.md", name, f"\n{wanted}\n")
