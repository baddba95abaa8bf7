"""Pauses: how long a training thread was held up by a fault that did not befall its cluster."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from dsx.bench.chaos.logs import Rank, Record, Window
from dsx.bench.chaos.verdict import Verdict


def measure_pauses(
    logs: Mapping[Rank, Sequence[Record]], windows: Sequence[Window], verdict: Verdict
) -> None:
    """Take each fault's longest step of a cluster that it did not befall, beyond the usual one.

    What is usual is the median of a rank's steps beside which there was no fault.
    """
    taken = {
        rank: sorted((r["at"], r["seconds"]) for r in log if r["what"] == "step")
        for rank, log in logs.items()
    }
    times = {rank: [at for at, _ in steps] for rank, steps in taken.items()}
    usual: dict[Rank, float] = {}
    for rank, steps in taken.items():
        places = [_steps_of(window, times[rank]) for window in windows]
        disturbed = {place for of_window in places for place in of_window}
        if len(disturbed) < len(steps):
            usual[rank] = statistics.median(
                seconds for place, (_, seconds) in enumerate(steps) if place not in disturbed
            )
    pauses: list[float] = []
    for window in windows:
        longest = [
            max(taken[rank][place][1] for place in beside) - usual[rank]
            for rank in usual
            if rank[0] != window.cluster and (beside := _steps_of(window, times[rank]))
        ]
        if longest:
            pauses.append(max(0.0, *longest))
    if pauses:
        verdict.pause_median_seconds = statistics.median(pauses)
        verdict.pause_max_seconds = max(pauses)


def _steps_of(window: Window, times: Sequence[float]) -> range:
    """Return the places of the steps that were taken beside a fault; `times` ascend."""
    return range(bisect_left(times, window.begin), bisect_right(times, window.end))
