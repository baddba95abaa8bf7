"""The table of a check: a row per thing looked at, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "failed", "not run", "seen"]


@dataclass(frozen=True)
class Row:
    """What was looked at, what is wanted of it, what was seen, and what that comes to.

    "seen" is of a number that has no bound; "not run" says in `seen` what is missing.
    """

    group: str
    what: str
    wanted: str
    seen: str
    outcome: Outcome


def as_markdown(rows: Sequence[Row], machine: str) -> str:
    """Return the table, with the machine above it and the count below."""
    lines = [machine, "", "| what | | wanted | seen | |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        seen = row.seen.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {row.group} | {row.what} | {row.wanted} | {seen} | {row.outcome} |")
    outcomes = [row.outcome for row in rows]
    counted = [f"{outcomes.count(kind)} {kind}" for kind in ("ok", "failed", "not run", "seen")]
    return "\n".join([*lines, "", ", ".join(counted), ""])
