"""A timeline as Chrome Trace Events, for ui.perfetto.dev and chrome://tracing.

One process per rank, one thread per thread; times in microseconds from the first span. An arrow
leads from each launch over its transfer to where it is applied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dsx.telemetry.trace.batch import TRAINING, TRANSFERS, Span, Track

Event = dict[str, Any]
_ARROW = {"launch": "s", "transfer": "t", "apply": "f"}  # start, step, finish


class ChromeFile:
    """Writes a file rank by rank; `count` says how many spans it has. A context: it ends the file.

    `origin` is the time that counts as 0, in microseconds.
    """

    def __init__(self, path: Path, origin: int) -> None:
        self._path, self._origin = path, origin
        self._file = path.open("w")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        self._between = "\n"
        self._num_ranks = self._num_arrows = 0
        self.count = 0

    def __enter__(self) -> ChromeFile:
        """Return this."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End the file, or remove what is there of it."""
        with self._file:
            if kind is None:
                self._file.write("\n]}\n")
        if kind is not None and self._path.is_file():
            self._path.unlink()

    def add(self, spans: Sequence[Span]) -> None:
        """Write one rank's spans: by start, an outer one before those inside."""
        self._num_ranks += 1
        places = _places(spans, self._num_ranks)
        arrows: dict[tuple[int, int], int] = {}
        heads: dict[tuple[str, str, Track], str] = {}
        for event in _names(places):
            self._write(json.dumps(event))
        for span in spans:
            key = span.name, span.category, span.track
            head = heads.get(key) or heads.setdefault(key, _head(span, *places[span.track]))
            at = span.start - self._origin
            self._write(f'{head}{at}, "dur": {span.end - span.start}, "args": {_facts(span)}}}')
            if span.name in _ARROW and "launched" in span.facts:
                transfer = span.facts["fragment"], span.facts["launched"]
                number = arrows.setdefault(transfer, self._num_arrows + len(arrows))
                self._write(json.dumps(_arrow(span.name, at, *places[span.track], number)))
        self._num_arrows += len(arrows)
        self.count += len(spans)

    def _write(self, event: str) -> None:
        self._file.write(self._between + event)
        self._between = ",\n"


def thread_name(thread: str) -> str:
    """Return what a thread is called: "training", "fragment 0"."""
    return thread.removeprefix(TRANSFERS).replace("-", " ")


def thread_order(track: Track) -> tuple[bool, int, str]:
    """Sort threads: training first, fragments by number."""
    return track[2] != TRAINING, len(track[2]), track[2]


def _places(spans: Sequence[Span], pid: int) -> dict[Track, tuple[int, int]]:
    """Number the threads of a rank through all of them: Perfetto names by thread alone."""
    own = sorted({span.track for span in spans}, key=thread_order)
    return {track: (pid, 1000 * pid + index) for index, track in enumerate(own)}


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


def _head(span: Span, pid: int, tid: int) -> str:
    """Return how the events of all spans of a name and a thread begin."""
    own = {"name": span.name, "cat": span.category, "ph": "X", "pid": pid, "tid": tid}
    return json.dumps(own)[:-1] + ', "ts": '


def _facts(span: Span) -> str:
    if not span.facts:
        return f'{{"step": {span.step}}}'
    return json.dumps({"step": span.step, **span.facts})


def _arrow(name: str, at: int, pid: int, tid: int, number: int) -> Event:
    """Return an arrow's start, way or end at a span, which has to come just before."""
    phase = _ARROW[name]
    place = {"ts": at, "pid": pid, "tid": tid}
    arrow = {"name": "transfer", "cat": "arrow", "ph": phase, "id": number, **place}
    return {**arrow, "bp": "e"} if phase == "f" else arrow
