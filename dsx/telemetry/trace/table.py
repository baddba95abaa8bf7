"""Where the time went: seconds by what was done, per rank, summed up while spans are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from rich.table import Table

from dsx.telemetry.trace.batch import TRAINING, Span, Track

TRAINING_ROWS = ("forward", "backward", "optimizer", "compute", "launch", "wait", "apply")
TRANSFER_ROWS = ("meet", "copy", "encode", "network", "reduce", "decode")
MOST_COLUMNS = 6  # ranks; of more the least, the mean and the largest
_MOST_BESIDE = 100_000  # spans of a thread beside each other, that one may still be around
_MOST_HANDSHAKES = 1000  # of a rank, by which clocks are compared
_OTHER = "other"
Rank = tuple[int, int]


class SelfTimes:
    """Microseconds between two times by thread and category: the innermost span's.

    A thread's spans are told as they end, so those inside come before the one around them, and none
    has to be kept for longer.
    """

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end
        self._beside: dict[Track, list[tuple[int, int]]] = {}  # starts, and what is in the time
        self.totals: dict[tuple[Track, str], int] = {}

    def add(self, span: Span) -> None:
        """Take a span that has ended."""
        inside = max(0, min(span.end, self._end) - max(span.start, self._start))
        beside = self._beside.setdefault(span.track, [])
        within = 0
        while beside and beside[-1][0] >= span.start:
            within += beside.pop()[1]
        key = span.track, span.category
        self.totals[key] = self.totals.get(key, 0) + inside - within
        beside.append((span.start, inside))
        if len(beside) > _MOST_BESIDE:
            del beside[: _MOST_BESIDE // 2]


class Clocks:
    """Compares clusters' clocks by what ends together: both sides of a launch handshake."""

    def __init__(self) -> None:
        self._ends: dict[Rank, deque[tuple[tuple[int, int, int], int]]] = {}

    def add(self, span: Span) -> None:
        """Take a span; of a rank the last thousand handshakes count."""
        if span.name == "handshake":
            key = span.track[1], span.facts["fragment"], span.facts["launched"]
            own = self._ends.setdefault(span.rank, deque(maxlen=_MOST_HANDSHAKES))
            own.append((key, span.end))

    def offsets(self) -> dict[int, float]:
        """Return by how many seconds each cluster's clock seems ahead of cluster 0's.

        Both sides end to within the latency: the median difference.
        """
        ends: dict[tuple[int, int, int], dict[int, int]] = {}
        for (cluster, _), own in self._ends.items():
            for key, end in own:
                ends.setdefault(key, {})[cluster] = end
        apart: dict[int, list[int]] = {}
        for each in ends.values():
            for cluster in each if 0 in each else ():
                apart.setdefault(cluster, []).append(each[cluster] - each[0])
        return {m: median(apart[m]) / 1e6 for m in sorted(apart) if m}


class Sums:
    """What the table shows, of the time from `start` to `end` in microseconds."""

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end
        self.seconds: dict[Rank, dict[str, float]] = {}
        self.clocks = Clocks()

    @property
    def whole(self) -> float:
        """Seconds of the whole time."""
        return (self._end - self._start) / 1e6

    def pass_on(self, rank: Rank, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield a rank's spans as they come, and sum them up, which needs all to be taken."""
        times = SelfTimes(self._start, self._end)
        for span in spans:
            times.add(span)
            self.clocks.add(span)
            yield span
        totals: dict[str, float] = {}
        trained = 0.0
        for (track, category), spent in times.totals.items():
            totals[category] = totals.get(category, 0.0) + spent / 1e6
            trained += spent / 1e6 if track[2] == TRAINING else 0.0
        totals[_OTHER] = self.whole - trained
        self.seconds[rank] = totals


def time_table(sums: Sums) -> Table:
    """Return the table; shares are of the whole time, the mean over ranks."""
    ranks = sorted(sums.seconds)
    is_wide = len(ranks) > MOST_COLUMNS
    table = Table(title="seconds", title_justify="left")
    table.add_column("")
    names = ["least", "mean", "most"] if is_wide else [f"cluster {m}\nrank {r}" for m, r in ranks]
    for name in [*names, "share"]:
        table.add_column(name, justify="right")
    for title, rows in (("training thread", TRAINING_ROWS), ("transfers", TRANSFER_ROWS)):
        rows = [*rows, _OTHER] if rows is TRAINING_ROWS else rows
        table.add_row(f"[bold]{title}[/bold]")
        for row in rows:
            values = [sums.seconds[rank].get(row, 0.0) for rank in ranks]
            if any(values):
                mean = sum(values) / len(values)
                shown = [min(values), mean, max(values)] if is_wide else values
                share = f"{100 * mean / sums.whole:.1f} %" if sums.whole else "-"
                table.add_row(f"  {row}", *(f"{value:.3f}" for value in shown), share)
        table.add_section()
    return table


def clock_lines(clocks: Clocks) -> Sequence[str]:
    """Say how far clocks of clusters are apart."""
    lines: list[str] = []
    for m, offset in clocks.offsets().items():
        where = "ahead of" if offset > 0 else "behind"
        lines.append(
            f"cluster {m}'s clock is {1e3 * abs(offset):.1f} ms {where} cluster 0's, as far as "
            "transfers tell; times are left as they are"
        )
    return lines
