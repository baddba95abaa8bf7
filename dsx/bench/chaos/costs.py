"""What each kind of fault costs those whom it did not befall: a step that takes longer."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from dsx.bench.chaos.logs import Rank, Record, Window
from dsx.bench.chaos.pauses import pauses_of


def costs_by_kind(
    logs: Mapping[Rank, Sequence[Record]], windows: Sequence[Window]
) -> dict[str, dict[str, float]]:
    """Return by kind of fault the number of faults, and their pauses' median and longest, seconds.

    A fault beside which nobody else took a step has cost nothing.
    """
    pauses: dict[str, list[float]] = defaultdict(list)
    for window, pause in zip(windows, pauses_of(logs, windows), strict=True):
        pauses[window.kind].append(pause or 0.0)
    return {
        kind: {
            "faults": len(of_kind),
            "median_seconds": statistics.median(of_kind),
            "max_seconds": max(of_kind),
        }
        for kind, of_kind in sorted(pauses.items())
    }
