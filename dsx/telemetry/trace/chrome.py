"""A timeline as Chrome Trace Events, for ui.perfetto.dev and chrome://tracing.

One process per rank, one thread per thread; times in microseconds from the first span. An arrow
leads from each launch over its transfer to where it is applied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsx.telemetry.trace.files import Span, Timeline, Track
from dsx.telemetry.trace.recorder import TRAINING, TRANSFERS

Event = dict[str, Any]
_ARROW = {"launch": "s", "transfer": "t", "apply": "f"}  # start, step, finish


def write_chrome(timeline: Timeline, path: Path) -> int:
    """Write the file; return how many spans it has."""
    places = _places(timeline)
    events = [*_names(places)]
    arrows: dict[tuple[int, int, int], int] = {}
    for span in timeline.spans:
        event = _complete(span, places[span.track], timeline.start)
        events.append(event)
        if span.name in _ARROW and "launched" in span.facts:
            key = event["pid"], span.facts["fragment"], span.facts["launched"]
            events.append(_arrow(event, arrows.setdefault(key, len(arrows))))
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document) + "\n")
    return len(timeline.spans)


def thread_name(thread: str) -> str:
    """Return what a thread is called: "training", "fragment 0"."""
    return thread.removeprefix(TRANSFERS).replace("-", " ")


def thread_order(track: Track) -> tuple[bool, int, str]:
    """Sort threads: training first, fragments by number."""
    return track[2] != TRAINING, len(track[2]), track[2]


def _places(timeline: Timeline) -> dict[Track, tuple[int, int]]:
    """Number processes from 1, and threads through all of them: Perfetto names by thread alone."""
    places: dict[Track, tuple[int, int]] = {}
    tracks = {span.track for span in timeline.spans}
    for pid, rank in enumerate(timeline.ranks, start=1):
        own = sorted((track for track in tracks if track[:2] == rank), key=thread_order)
        places |= {track: (pid, 1000 * pid + index) for index, track in enumerate(own)}
    return places


def _names(places: dict[Track, tuple[int, int]]) -> Iterator[Event]:
    for track, (pid, tid) in places.items():
        cluster, rank, thread = track
        if tid == 1000 * pid:
            process = f"cluster {cluster} rank {rank}"
            yield _metadata("process_name", pid, tid, name=process)
            yield _metadata("process_sort_index", pid, tid, sort_index=pid)
        yield _metadata("thread_name", pid, tid, name=thread_name(thread))
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _complete(span: Span, place: tuple[int, int], origin: int) -> Event:
    pid, tid = place
    return {
        "name": span.name, "cat": span.category, "ph": "X", "pid": pid, "tid": tid,
        "ts": span.start - origin, "dur": span.end - span.start,
        "args": {"step": span.step, **span.facts},
    }  # fmt: skip


def _arrow(event: Event, number: int) -> Event:
    """Return an arrow's start, way or end at a span, which has to come just before."""
    place = {key: event[key] for key in ("ts", "pid", "tid")}
    phase = _ARROW[event["name"]]
    arrow = {"name": "transfer", "cat": "arrow", "ph": phase, "id": number, **place}
    return {**arrow, "bp": "e"} if phase == "f" else arrow
