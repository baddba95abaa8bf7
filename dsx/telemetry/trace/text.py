"""Traces of dsx 0.1 and 0.2: a line of JSON for each span, without an index.

They are gone through once to see what some hundred lines at a time hold, and again for what is
wanted of that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from dsx.telemetry.trace.batch import TRAINING, Span
from dsx.telemetry.trace.frames import Head

_OLD_NAMES = {"announce": "handshake", "judge": "check", "notes": "sideband"}  # of dsx 0.1
_LINES = 500  # of a piece
_Placed = tuple[int, int, Span]  # from where to where in the file


def read_text_heads(path: Path) -> tuple[str, list[Head], int]:
    """Return the last session, what pieces of the file hold, and how many lines are none."""
    heads: list[Head] = []
    session, malformed = "", 0
    held: list[_Placed] = []
    with path.open("rb") as file:
        at = 0
        for line in file:
            begun, at = at, at + len(line)
            try:
                record = cast("dict[str, Any]", json.loads(line))
                if "session" in record:
                    session = str(record["session"])
                else:
                    held.append((begun, at, _span(0, 0, record)))
            except (ValueError, KeyError, TypeError):
                malformed += 1
            if len(held) >= _LINES:
                heads.append(_head(held))
                held = []
    return session, heads + ([_head(held)] if held else []), malformed


def spans_of_text(path: Path, heads: Iterable[Head], cluster: int, rank: int) -> Iterator[Span]:
    """Yield the spans of some pieces, as they were written."""
    with path.open("rb") as file:
        for head in heads:
            file.seek(head.offset)
            for line in file.read(head.length).splitlines():
                try:
                    record = cast("dict[str, Any]", json.loads(line))
                    if "session" not in record:
                        yield _span(cluster, rank, record)
                except (ValueError, KeyError, TypeError):
                    continue  # counted when the file was gone through


def _head(held: list[_Placed]) -> Head:
    spans = [span for *_, span in held]
    taken = [span.step for span in spans if span.track[2] == TRAINING]
    return Head(
        held[0][0], held[-1][1] - held[0][0], min(s.step for s in spans),
        max(s.step for s in spans), (min(taken), max(taken)) if taken else None,
        min(s.start for s in spans), max(s.end for s in spans), len(spans),
    )  # fmt: skip


def _span(cluster: int, rank: int, record: dict[str, Any]) -> Span:
    facts = dict(record)
    name, category, thread = (facts.pop(key) for key in ("name", "category", "thread"))
    start, duration, step = (facts.pop(key) for key in ("start_us", "duration_us", "step"))
    name = str(_OLD_NAMES.get(name, name))
    return Span((cluster, rank, thread), name, category, start, start + duration, step, facts)
