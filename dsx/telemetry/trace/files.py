"""What a run's ranks did, from the files that parts.py has written: a selection, read rank by rank.

What is not asked for is not read: of other ranks not even the names' files are opened, of other
steps not more than the pieces' headers. Traces of dsx 0.1 and 0.2, a line of JSON per span, are
gone through line by line instead (text.py).

Files of another run in the same directory (of more ranks, say) are left out: a trace tells by the
newest piece in it whose it is, and the run that wrote last counts. What is damaged, as a killed
rank leaves it, is counted and skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from dsx.telemetry.run_folder import sessions_of
from dsx.telemetry.trace.batch import TRAINING, Span, from_line
from dsx.telemetry.trace.frames import Head, end_of, heads_of, lines_of
from dsx.telemetry.trace.parts import last_session, parts_of
from dsx.telemetry.trace.text import read_text_heads, spans_of_text

Rank = tuple[int, int]  # cluster, rank in it
_MOST_DAMAGED = 8  # pieces at the end, before it is said that nobody knows whose a file is


@dataclass
class RankTrace:
    """One rank's files, and what they say together; `malformed` grows while they are read.

    `taken` are the first and last step of its training thread, `time` is from where to where. Of
    packed files no more is kept: their headers are gone through again for what is asked.
    """

    rank: Rank
    paths: list[Path]
    text: dict[Path, list[Head]] = field(default_factory=dict[Path, list[Head]])
    session: str = ""
    taken: tuple[int, int] | None = None
    time: tuple[int, int] | None = None
    dropped: int = 0
    malformed: int = 0

    def heads(self) -> Iterator[Head]:
        """Yield what all pieces say, the oldest first."""
        for path in self.paths:
            yield from self.heads_in(path)

    def heads_in(self, path: Path) -> Iterable[Head]:
        """Return what the pieces of one of its files say, the oldest first."""
        return self.text[path] if path in self.text else heads_of(path)

    def spans(self, is_wanted: Callable[[Head], bool]) -> Iterator[Span]:
        """Yield the spans of some pieces, as they ended on each thread."""
        for path in self.paths:
            wanted = filter(is_wanted, self.heads_in(path))
            if path in self.text:
                yield from spans_of_text(path, wanted, *self.rank)
            else:
                yield from self._unpacked(path, wanted)

    def note(self, head: Head) -> None:
        """Take what a piece says into what all say."""
        self.time = _around(self.time, (head.start, head.end))
        self.taken = _around(self.taken, head.taken)
        self.dropped += head.dropped

    def _unpacked(self, path: Path, heads: Iterable[Head]) -> Iterator[Span]:
        for head, line in lines_of(path, heads):
            try:
                yield from from_line(line or b"", *self.rank)
            except ValueError:
                self.malformed += head.num_spans


@dataclass(frozen=True)
class Selection:
    """Some ranks' spans that overlap the time from `start` to `end`, in microseconds."""

    ranks: list[RankTrace]
    steps: tuple[int, int]
    start: int
    end: int
    left_out: int = 0  # files of another run
    is_all: bool = False  # what ended when this begins, or begins when it ends, is in it, too

    def spans(self, rank: RankTrace) -> Iterator[Span]:
        """Yield a rank's, in the order in which they ended on each thread."""
        for span in rank.spans(self._is_wanted):
            if self.is_all or (span.start < self.end and span.end > self.start):
                yield span

    @cached_property
    def count(self) -> int:
        """Return how many spans there are at most, without reading them."""
        return sum(h.num_spans for r in self.ranks for h in r.heads() if self._is_wanted(h))

    def dropped(self) -> int:
        """Return how many could not be written by the ranks, as far as the files tell."""
        return sum(rank.dropped for rank in self.ranks)

    def malformed(self) -> int:
        """Return how many could not be read so far."""
        return sum(rank.malformed for rank in self.ranks)

    def _is_wanted(self, head: Head) -> bool:
        return head.start <= self.end and head.end >= self.start


@dataclass(frozen=True)
class Wanted:
    """What of a trace is to be read: steps from first to last, or the last so many; some ranks.

    A rank is the number in its cluster, and means that of every cluster.
    """

    steps: tuple[int, int] | None = None
    last: int | None = None
    ranks: frozenset[int] | None = None


def select(folder: Path, wanted: Wanted = Wanted()) -> Selection:  # noqa: B008 - it is frozen
    """Find what is wanted of a run's trace; ValueError if there is nothing."""
    parts = parts_of(folder)
    if not parts:
        raise _no_trace(folder, "")
    there = {rank for _, rank in parts}
    if lacking := sorted((wanted.ranks or set[int]()) - there):
        raise ValueError(
            f"--ranks {_listed(lacking)}: the trace has {_listed(sorted(there))}; choose among "
            "those"
        )
    chosen = {place: parts[place] for place in parts if _has(wanted.ranks, place[1])}
    ranks = [_open(place, paths) for place, paths in chosen.items()]
    kept = _of_newest_run(folder, ranks)
    held, time = None, None
    for rank in kept:
        held, time = _around(held, rank.taken), _around(time, rank.time)
    assert time is not None  # the newest run has written something
    held = held or (0, 0)
    steps = wanted.steps or held
    if wanted.last is not None:
        steps = max(held[0], held[1] - wanted.last + 1), held[1]
    is_all = steps == held and not wanted.steps
    start, end = time if is_all else _time_of(kept, steps)
    if start > end:
        raise ValueError(
            f"--steps {steps[0]}-{steps[1]}: the trace holds steps {held[0]} to {held[1]}; choose "
            "among those (metrics.trace_steps says what a run records, and metrics.trace_megabytes "
            "how much of it is kept)"
        )
    left_out = sum(len(rank.paths) for rank in ranks if rank not in kept)
    return Selection(kept, steps, start, end, left_out, is_all)


def _open(place: Rank, paths: list[Path]) -> RankTrace:
    trace = RankTrace(place, paths)
    for path in paths:
        newest: deque[Head] = deque(maxlen=_MOST_DAMAGED)
        if path.suffix == ".jsonl":
            trace.session, trace.text[path], bad = read_text_heads(path)
            trace.malformed += bad
        for head in trace.heads_in(path):
            trace.note(head)
            newest.append(head)
        if path not in trace.text:
            trace.malformed += end_of(newest[-1] if newest else None) < path.stat().st_size
            trace.session = last_session(path, newest) or trace.session
    return trace


def _of_newest_run(folder: Path, ranks: list[RankTrace]) -> list[RankTrace]:
    known = sessions_of(folder)
    written = [
        (rank.time[1], rank.session)
        for rank in ranks
        if rank.time and rank.session in (known or {rank.session})
    ]
    if not written:
        count = sum(len(rank.paths) for rank in ranks)
        raise _no_trace(folder, f" of this run ({count} files are of another)")
    newest = max(written)[1]
    own = {newest} | (known if newest in known else set())
    return [rank for rank in ranks if rank.session in own]


def _time_of(ranks: list[RankTrace], steps: tuple[int, int]) -> tuple[int, int]:
    """Return the time in which training threads took some steps; none: the end before the start."""
    first, last = steps

    def is_in(head: Head) -> bool:
        return head.taken is not None and head.taken[0] <= last and head.taken[1] >= first

    start, end = 1 << 62, 0
    for rank in ranks:
        for span in rank.spans(is_in):
            if span.track[2] == TRAINING and first <= span.step <= last:
                start, end = min(start, span.start), max(end, span.end)
    return start, end


def _around(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the least range that has both in it."""
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


def _no_trace(folder: Path, others: str) -> ValueError:
    return ValueError(
        f'{folder} holds no trace{others}: add "trace": true beside "dir" in the "metrics" of '
        'the "dsx" block (Megatron: --dsx-metrics-trace true) and run again'
    )


def _has(ranks: frozenset[int] | None, rank: int) -> bool:
    return ranks is None or rank in ranks


def _listed(ranks: list[int]) -> str:
    """Write numbers as they are given: "0,3-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
