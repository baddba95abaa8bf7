"""A timeline as Chrome Trace Events, for ui.perfetto.dev and chrome://tracing.

One process per rank, one thread per thread; times in microseconds from the first span. An arrow
leads from each launch over its transfer to where it is applied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsx.trace.files import Lane, Span, Timeline
from dsx.trace.recorder import TRAINING, TRANSFERS

Event = dict[str, Any]
_ARROW = {"launch": "s", "transfer": "t", "apply": "f"}  # start, step, finish


def write_chrome(timeline: Timeline, path: Path) -> int:
    """Write the file; return how many spans it has."""
    places = _places(timeline)
    events = [*_names(places)]
    for span in timeline.spans:
        events += _events(span, places, timeline.start)
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document) + "\n")
    return len(timeline.spans)


def thread_name(thread: str) -> str:
    """Return what a thread is called: "training", "fragment 0"."""
    return thread.removeprefix(TRANSFERS).replace("-", " ")


def thread_order(lane: Lane) -> tuple[bool, int, str]:
    """Sort threads: training first, fragments by number."""
    return lane[2] != TRAINING, len(lane[2]), lane[2]


def _places(timeline: Timeline) -> dict[Lane, tuple[int, int]]:
    """Number processes and threads."""
    places: dict[Lane, tuple[int, int]] = {}
    lanes = {span.lane for span in timeline.spans}
    for pid, rank in enumerate(timeline.ranks):
        own = sorted((lane for lane in lanes if lane[:2] == rank), key=thread_order)
        places |= {lane: (pid, tid) for tid, lane in enumerate(own)}
    return places


def _names(places: dict[Lane, tuple[int, int]]) -> Iterator[Event]:
    for lane, (pid, tid) in places.items():
        cluster, rank, thread = lane
        if tid == 0:
            process = f"cluster {cluster} rank {rank}"
            yield _metadata("process_name", pid, 0, name=process)
            yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        yield _metadata("thread_name", pid, tid, name=thread_name(thread))
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _events(span: Span, places: dict[Lane, tuple[int, int]], origin: int) -> Iterator[Event]:
    pid, tid = places[span.lane]
    place = {"ts": span.start - origin, "pid": pid, "tid": tid}
    args = {"step": span.step, **span.facts}
    named = {"name": span.name, "cat": span.category, "ph": "X"}
    yield {**named, **place, "dur": span.end - span.start, "args": args}
    if span.name in _ARROW and "launched" in span.facts:
        arrow = f"{pid}/{span.facts['fragment']}/{span.facts['launched']}"
        phase = _ARROW[span.name]
        event = {"name": "transfer", "cat": "arrow", "ph": phase, "id": arrow, **place}
        yield {**event, "bp": "e"} if phase == "f" else event
