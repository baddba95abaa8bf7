"""What each kind of fault costs those whom it did not befall: a step that takes longer."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from dsx.bench.chaos.logs import Record, Window

Logs = Mapping[tuple[int, int], Sequence[Record]]


def costs_by_kind(logs: Logs, windows: Sequence[Window]) -> dict[str, dict[str, float]]:
    """Return by kind of fault the number of faults, and their pauses' median and longest, seconds.

    A fault's pause is the longest step of a rank of another cluster beside it, beyond the median of
    that rank's steps.
    """
    steps = {
        rank: sorted((r["at"], r["seconds"]) for r in log if r["what"] == "step")
        for rank, log in logs.items()
    }
    times = {rank: [at for at, _ in taken] for rank, taken in steps.items()}
    usual = {rank: statistics.median(s for _, s in taken) for rank, taken in steps.items() if taken}
    pauses: dict[str, list[float]] = defaultdict(list)
    for window in windows:
        longest = 0.0
        for rank in usual:
            if rank[0] != window.cluster:
                first = bisect_left(times[rank], window.begin)
                beside = steps[rank][first : bisect_right(times[rank], window.end)]
                longest = max([longest, *(seconds - usual[rank] for _, seconds in beside)])
        pauses[window.kind].append(longest)
    return {
        kind: {
            "faults": len(of_kind),
            "median_seconds": statistics.median(of_kind),
            "max_seconds": max(of_kind),
        }
        for kind, of_kind in sorted(pauses.items())
    }
