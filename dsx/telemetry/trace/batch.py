"""The spans of a rank's step as one line of JSON, by columns: the same words once, times as steps.

    {"session": ..., "kinds": [["forward", "forward", "training"], ...], "kind": [0, 1, 0, ...],
     "start_us": ..., "after": [0, 812, ...], "us": [790, 1530, ...],
     "step": 40, "back": [0, 0, 2, ...], "facts": {"fragment": {"2": 0, ...}, ...}}

A span begins `after` so many microseconds from the one before in the file (they are in the order in
which they ended), lasts `us`, and belongs to `step` less `back`; without "back" all are of `step`.
Facts are by name, then by the place of the span.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from dsx.telemetry.trace.frames import Head

TRAINING = "training"  # what threads are called
TRANSFERS = "dsx-"  # what the names of threads begin with that are not the training's
Track = tuple[int, int, str]  # cluster, rank, thread
Noted = tuple[str, str, str, int, int, int, dict[str, Any]]
_NO_FACTS: dict[str, Any] = {}


class Span(NamedTuple):
    """What one thread did from `start` to `end`, in microseconds; `facts` is all else."""

    track: Track
    name: str
    category: str
    start: int
    end: int
    step: int
    facts: dict[str, Any]

    @property
    def rank(self) -> tuple[int, int]:
        """The cluster, and the rank in it."""
        return self.track[:2]


def to_line(session: str, spans: Sequence[Noted], dropped: int = 0) -> tuple[bytes, Head]:
    """Return spans as a line, and what is to be said of it.

    A span is (name, category, thread, start, end, step, facts), its times in microseconds.
    """
    kinds: dict[tuple[str, str, str], int] = {}
    kind: list[int] = [kinds.setdefault(span[:3], len(kinds)) for span in spans]
    starts = [span[3] for span in spans]
    steps = [span[5] for span in spans]
    first, last = min(steps, default=0), max(steps, default=0)
    facts: dict[str, dict[str, Any]] = {}
    for place, span in enumerate(spans):
        for key, value in span[6].items():
            facts.setdefault(key, {})[str(place)] = value
    record: dict[str, Any] = {
        "session": session,
        "kinds": [*kinds],
        "kind": kind,
        "start_us": starts[0] if starts else 0,
        "after": [b - a for a, b in zip(starts[:1] + starts, starts, strict=False)],
        "us": [span[4] - span[3] for span in spans],
        "step": last,
    }
    if first < last:
        record["back"] = [last - step for step in steps]
    if facts:
        record["facts"] = facts
    taken = [span[5] for span in spans if span[2] == TRAINING]
    head = Head(
        0, 0, first, last, (min(taken), max(taken)) if taken else None,
        min(starts, default=0), max((span[4] for span in spans), default=0), len(spans), dropped,
    )  # fmt: skip
    return json.dumps(record, separators=(",", ":")).encode() + b"\n", head


def session_in(line: bytes) -> str:
    """Return whose spans a line has."""
    return str(json.loads(line)["session"])


def from_line(line: bytes, cluster: int, rank: int) -> list[Span]:
    """Return the spans of a line in the order in which they ended; ValueError for what is none."""
    try:
        return _spans(cast("dict[str, Any]", json.loads(line)), cluster, rank)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no spans: {error!r}") from error


def _spans(record: dict[str, Any], cluster: int, rank: int) -> list[Span]:
    kinds = [
        (name, category, (cluster, rank, thread)) for name, category, thread in record["kinds"]
    ]
    count = len(record["kind"])
    facts: dict[int, dict[str, Any]] = {}
    for key, values in record.get("facts", _NO_FACTS).items():
        for place, value in values.items():
            facts.setdefault(int(place), {})[key] = value
    start, step = record["start_us"], record["step"]
    back = record.get("back") or [0] * count
    spans: list[Span] = []
    columns = zip(record["kind"], record["after"], record["us"], back, strict=True)
    for place, (kind, after, duration, steps_back) in enumerate(columns):
        name, category, track = kinds[kind]
        start += after
        own = facts.get(place, _NO_FACTS)
        spans.append(Span(track, name, category, start, start + duration, step - steps_back, own))
    return spans
