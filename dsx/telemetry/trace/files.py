"""What a run's ranks did, from the files that parts.py has written: a selection, read rank by rank.

What is not asked for is not read: of other ranks not even the names' files are opened, of other
steps not more than the pieces' headers. Traces of dsx 0.1 and 0.2, a line of JSON per span, are
gone through line by line instead (text.py).

Files of another run in the same directory (of more ranks, say) are left out: a trace tells by the
newest piece in it whose it is, and the run that wrote last counts. What is damaged, as a killed
rank leaves it, is counted and skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dsx.telemetry.run_folder import sessions_of
from dsx.telemetry.trace.batch import TRAINING, Span, from_line
from dsx.telemetry.trace.frames import Head, heads_of, lines_of
from dsx.telemetry.trace.parts import last_session, parts_of
from dsx.telemetry.trace.text import read_text_heads, spans_of_text

Rank = tuple[int, int]  # cluster, rank in it


@dataclass
class RankTrace:
    """One rank's files, by what their pieces say; `malformed` grows while they are read."""

    rank: Rank
    pieces: dict[Path, list[Head]]
    session: str
    malformed: int = 0

    def heads(self) -> Iterator[Head]:
        """Yield what all pieces say, the oldest first."""
        for heads in self.pieces.values():
            yield from heads

    def spans(self, is_wanted: Callable[[Head], bool]) -> Iterator[Span]:
        """Yield the spans of some pieces, as they ended on each thread."""
        for path, heads in self.pieces.items():
            wanted = [head for head in heads if is_wanted(head)]
            if path.suffix == ".jsonl":
                yield from spans_of_text(path, wanted, *self.rank)
            else:
                yield from self._unpacked(path, wanted)

    def _unpacked(self, path: Path, heads: list[Head]) -> Iterator[Span]:
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

    def count(self) -> int:
        """Return how many spans there are at most, without reading them."""
        return sum(h.num_spans for r in self.ranks for h in r.heads() if self._is_wanted(h))

    def dropped(self) -> int:
        """Return how many could not be written by the ranks, as far as the files tell."""
        return sum(head.dropped for rank in self.ranks for head in rank.heads())

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
    ranks: frozenset[int] | None = field(default=None)


def select(folder: Path, wanted: Wanted = Wanted()) -> Selection:  # noqa: B008 - it is frozen
    """Find what is wanted of a run's trace; ValueError if there is nothing."""
    parts = parts_of(folder)
    if not parts:
        raise _no_trace(folder, "")
    chosen = {place: parts[place] for place in parts if _has(wanted.ranks, place[1])}
    if not chosen:
        there = sorted({rank for _, rank in parts})
        raise ValueError(
            f"--ranks {_listed(sorted(wanted.ranks or ()))}: the trace has {_listed(there)}; "
            "choose among those"
        )
    ranks = [_open(place, paths) for place, paths in chosen.items()]
    kept = _of_newest_run(folder, ranks)
    held = _steps_of(kept)
    first, last = wanted.steps or held
    if wanted.last is not None:
        first = max(held[0], held[1] - wanted.last + 1)
    is_all = (first, last) == held and not wanted.steps
    start, end = _time_of(kept, (first, last), is_all)
    if start > end:
        raise ValueError(
            f"--steps {first}-{last}: the trace holds steps {held[0]} to {held[1]}; choose among "
            "those (metrics.trace_steps says what a run records, and metrics.trace_megabytes how "
            "much of it is kept)"
        )
    left_out = sum(len(rank.pieces) for rank in ranks if rank not in kept)
    return Selection(kept, (first, last), start, end, left_out, is_all)


def _open(place: Rank, paths: list[Path]) -> RankTrace:
    pieces: dict[Path, list[Head]] = {}
    session, malformed = "", 0
    for path in paths:
        if path.suffix == ".jsonl":
            session, pieces[path], bad = read_text_heads(path)
            malformed += bad
        else:
            pieces[path], end = heads_of(path)
            malformed += end < path.stat().st_size
            session = last_session(path, pieces[path]) or session
    return RankTrace(place, pieces, session, malformed)


def _of_newest_run(folder: Path, ranks: list[RankTrace]) -> list[RankTrace]:
    known = sessions_of(folder)
    written = [
        (max(head.end for head in rank.heads()), rank.session)
        for rank in ranks
        if any(rank.heads()) and rank.session in (known or {rank.session})
    ]
    if not written:
        count = sum(len(rank.pieces) for rank in ranks)
        raise _no_trace(folder, f" of this run ({count} files are of another)")
    newest = max(written)[1]
    own = {newest} | (known if newest in known else set())
    return [rank for rank in ranks if rank.session in own]


def _steps_of(ranks: list[RankTrace]) -> tuple[int, int]:
    """Return the first and the last step that a training thread took."""
    taken = [head.taken for rank in ranks for head in rank.heads() if head.taken]
    return min((low for low, _ in taken), default=0), max((high for _, high in taken), default=0)


def _time_of(ranks: list[RankTrace], steps: tuple[int, int], is_all: bool) -> tuple[int, int]:
    """Return the time of steps, in which training threads took them; of all, that of every span."""
    if is_all:
        heads = [head for rank in ranks for head in rank.heads()]
        return min(head.start for head in heads), max(head.end for head in heads)
    first, last = steps

    def is_in(head: Head) -> bool:
        return head.taken is not None and head.taken[0] <= last and head.taken[1] >= first

    start, end = 1 << 62, 0
    for rank in ranks:
        for span in rank.spans(is_in):
            if span.track[2] == TRAINING and first <= span.step <= last:
                start, end = min(start, span.start), max(end, span.end)
    return start, end


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
