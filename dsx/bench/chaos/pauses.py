"""Pauses: how long a training thread was held up by a fault that did not befall its cluster."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from dsx.bench.chaos.logs import Rank, Record, Window
from dsx.bench.chaos.verdict import Verdict


def pauses_of(
    logs: Mapping[Rank, Sequence[Record]], windows: Sequence[Window]
) -> list[float | None]:
    """Return of each fault the longest step of another cluster beside it, beyond a usual one.

    In seconds, at least 0; None where nobody else took a step. Usual is the median of a rank's
    steps beside which there was no fault, of all its steps where there was one beside each.
    """
    taken = {
        rank: sorted((r["at"], r["seconds"]) for r in log if r["what"] == "step")
        for rank, log in logs.items()
    }
    times = {rank: [at for at, _ in steps] for rank, steps in taken.items()}
    usual: dict[Rank, float] = {}
    for rank, steps in taken.items():
        disturbed = {place for window in windows for place in _steps_of(window, times[rank])}
        quiet = [seconds for place, (_, seconds) in enumerate(steps) if place not in disturbed]
        if steps:
            usual[rank] = statistics.median(quiet or [seconds for _, seconds in steps])
    pauses: list[float | None] = []
    for window in windows:
        longest = [
            max(taken[rank][place][1] for place in beside) - usual[rank]
            for rank in usual
            if rank[0] != window.cluster and (beside := _steps_of(window, times[rank]))
        ]
        pauses.append(max(0.0, *longest) if longest else None)
    return pauses


def measure_pauses(
    logs: Mapping[Rank, Sequence[Record]], windows: Sequence[Window], verdict: Verdict
) -> None:
    """Enter the median and the longest one."""
    pauses = [pause for pause in pauses_of(logs, windows) if pause is not None]
    if pauses:
        verdict.pause_median_seconds = statistics.median(pauses)
        verdict.pause_max_seconds = max(pauses)


def _steps_of(window: Window, times: Sequence[float]) -> range:
    """Return the places of the steps that were taken beside a fault; `times` ascend."""
    return range(bisect_left(times, window.begin), bisect_right(times, window.end))
