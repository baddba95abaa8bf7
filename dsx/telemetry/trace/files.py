"""All ranks' spans of a run, from the files that recorder.py has written.

Files of another run in the same directory (of more ranks, say) are left out: a file tells by the
last session in it whose it is, and the run that wrote last counts. Lines that are none, as a
killed rank leaves them, are counted and skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from dsx.telemetry.run_folder import sessions_of
from dsx.telemetry.trace.recorder import TRAINING

_NAME = re.compile(r"trace\.cluster_(\d+)\.rank_(\d+)\.jsonl")
_OLD_NAMES = {"announce": "handshake", "judge": "check", "notes": "sideband"}  # of dsx 0.1
Track = tuple[int, int, str]  # cluster, rank, thread


@dataclass(frozen=True)
class Span:
    """What one thread did from `start` to `end`, in microseconds; `facts` is all else."""

    track: Track
    name: str
    category: str
    start: int
    end: int
    step: int
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def rank(self) -> tuple[int, int]:
        """The cluster, and the rank in it."""
        return self.track[:2]


@dataclass(frozen=True)
class Timeline:
    """A run's spans by start, an outer one before those inside, from `start` to `end`."""

    spans: list[Span]
    start: int
    end: int
    malformed: int = 0
    left_out: int = 0  # files

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """Clusters and ranks, in order."""
        return sorted({span.rank for span in self.spans})

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step that a training thread took."""
        taken = [span.step for span in self.spans if span.track[2] == TRAINING]
        return min(taken), max(taken)


def read_timeline(folder: Path) -> Timeline:
    """Read what a run's ranks wrote into its folder; ValueError if there is nothing."""
    paths = [path for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name)]
    files = [_read_file(path) for path in paths]
    known = sessions_of(folder)
    written = [(own[-1].end, name) for name, own, _ in files if own and name in (known or {name})]
    if not written:
        others = f" of this run ({len(files)} files are of another)" if files else ""
        raise ValueError(
            f'{folder} holds no trace{others}: add "trace": true beside "dir" in the "metrics" of '
            'the "dsx" block (Megatron: --dsx-metrics-trace true) and run again'
        )
    newest = max(written)[1]
    kept = [file for file in files if file[0] == newest]
    spans = sorted(
        (span for _, own, _ in kept for span in own), key=lambda s: (s.start, -s.end, s.track)
    )
    timeline = _timeline(spans)
    malformed = sum(count for *_, count in kept)
    return replace(timeline, malformed=malformed, left_out=len(files) - len(kept))


def cut(timeline: Timeline, first: int, last: int) -> Timeline:
    """Return the time of some steps: what overlaps it, whole. ValueError if there is none."""
    held = timeline.steps
    taken = [s for s in timeline.spans if s.track[2] == TRAINING and first <= s.step <= last]
    if not taken:
        raise ValueError(
            f"--steps {first}-{last}: the trace holds steps {held[0]} to {held[1]}; choose among "
            "those (metrics.trace_steps says what a run records)"
        )
    start, end = min(s.start for s in taken), max(s.end for s in taken)
    spans = [s for s in timeline.spans if s.start < end and s.end > start]
    return replace(timeline, spans=spans, start=start, end=end)


def self_times(spans: Iterable[Span], start: int, end: int) -> dict[tuple[Track, str], int]:
    """Return each thread's microseconds between two times, by category: the innermost span's."""
    totals: dict[tuple[Track, str], int] = {}
    for span, around in nested(spans):
        inside = max(0, min(span.end, end) - max(span.start, start))
        key = span.track, span.category
        totals[key] = totals.get(key, 0) + inside
        if around:
            totals[span.track, around[-1].category] -= inside
    return totals


def nested(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """Yield each span, and those of its thread around it, the innermost last."""
    open_spans: dict[Track, list[Span]] = {}
    for span in spans:
        stack = open_spans.setdefault(span.track, [])
        while stack and stack[-1].end < span.end:
            stack.pop()
        yield span, stack
        stack.append(span)


def clock_offsets(timeline: Timeline) -> dict[int, float]:
    """Return by how many seconds each cluster's clock seems ahead of cluster 0's.

    Both sides of a launch handshake end it together, to within the latency: the median difference.
    """
    ends: dict[tuple[int, int, int], dict[int, int]] = {}
    for span in timeline.spans:
        if span.name == "handshake":
            key = span.track[1], span.facts["fragment"], span.facts["launched"]
            ends.setdefault(key, {})[span.track[0]] = span.end
    apart: dict[int, list[int]] = {}
    for each in ends.values():
        for cluster in each if 0 in each else ():
            apart.setdefault(cluster, []).append(each[cluster] - each[0])
    return {m: median(apart[m]) / 1e6 for m in sorted(apart) if m}


def _timeline(spans: Sequence[Span]) -> Timeline:
    return Timeline(list(spans), min(s.start for s in spans), max(s.end for s in spans))


def _read_file(path: Path) -> tuple[str, list[Span], int]:
    """Return the last session, the spans in the order written, and how many lines are none."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    cluster, rank = int(found[1]), int(found[2])
    session, spans, malformed = "", list[Span](), 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = cast(dict[str, Any], json.loads(line))
            if "session" in record:
                session = record["session"]
            else:
                spans.append(_span(cluster, rank, record))
        except (json.JSONDecodeError, KeyError, TypeError):
            malformed += 1
    return session, spans, malformed


def _span(cluster: int, rank: int, record: dict[str, Any]) -> Span:
    facts = dict(record)
    name, category, thread = (facts.pop(key) for key in ("name", "category", "thread"))
    start, duration, step = (facts.pop(key) for key in ("start_us", "duration_us", "step"))
    name = str(_OLD_NAMES.get(name, name))
    return Span((cluster, rank, thread), name, category, start, start + duration, step, facts)
