"""Where the time went: seconds by what was done, per rank."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from dsx.telemetry.trace.files import Timeline, clock_offsets, self_times
from dsx.telemetry.trace.recorder import TRAINING

TRAINING_ROWS = ("forward", "backward", "optimizer", "compute", "launch", "wait", "apply")
TRANSFER_ROWS = ("meet", "copy", "encode", "network", "reduce", "decode")
MOST_COLUMNS = 6  # ranks; of more the least, the mean and the largest
_OTHER = "other"


def time_table(timeline: Timeline) -> Table:
    """Return the table; shares are of the whole time, the mean over ranks."""
    ranks = timeline.ranks
    seconds = {rank: _seconds_of(timeline, rank) for rank in ranks}
    is_wide = len(ranks) > MOST_COLUMNS
    table = Table(title="seconds", title_justify="left")
    table.add_column("")
    names = ["least", "mean", "most"] if is_wide else [f"cluster {m}\nrank {r}" for m, r in ranks]
    for name in [*names, "share"]:
        table.add_column(name, justify="right")
    whole = (timeline.end - timeline.start) / 1e6
    for title, rows in (("training thread", TRAINING_ROWS), ("transfers", TRANSFER_ROWS)):
        rows = [*rows, _OTHER] if rows is TRAINING_ROWS else rows
        table.add_row(f"[bold]{title}[/bold]")
        for row in rows:
            values = [seconds[rank].get(row, 0.0) for rank in ranks]
            if any(values):
                mean = sum(values) / len(values)
                shown = [min(values), mean, max(values)] if is_wide else values
                share = f"{100 * mean / whole:.1f} %" if whole else "-"
                table.add_row(f"  {row}", *(f"{value:.3f}" for value in shown), share)
        table.add_section()
    return table


def clock_lines(timeline: Timeline) -> Sequence[str]:
    """Say how far clocks of clusters are apart."""
    lines: list[str] = []
    for m, offset in clock_offsets(timeline).items():
        where = "ahead of" if offset > 0 else "behind"
        lines.append(
            f"cluster {m}'s clock is {1e3 * abs(offset):.1f} ms {where} cluster 0's, as far as "
            "transfers tell; times are left as they are"
        )
    return lines


def _seconds_of(timeline: Timeline, rank: tuple[int, int]) -> dict[str, float]:
    """Return one rank's seconds by row."""
    own = [span for span in timeline.spans if span.rank == rank]
    totals: dict[str, float] = {}
    trained = 0.0
    for (track, category), spent in self_times(own, timeline.start, timeline.end).items():
        totals[category] = totals.get(category, 0.0) + spent / 1e6
        trained += spent / 1e6 if track[2] == TRAINING else 0.0
    totals[_OTHER] = (timeline.end - timeline.start) / 1e6 - trained
    return totals
