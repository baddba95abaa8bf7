"""What the guard saw in one run: how its figures were spread, and what it would have warned of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

FIGURES = ("autocorrelation", "cluster_cosine", "norm_ratio", "effective_gain")
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


class GuardRecord:
    """Takes the events of cluster 0, whose figures are those of all."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {name: [] for name in FIGURES}
        self._alarms: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []  # of every sync, as it came

    def note(self, event: Mapping[str, Any]) -> None:
        """Take what a sync's event says."""
        for name, values in self._found.items():
            if name in event:
                values.append(event[name])
        told = ("fragment", "round", *FIGURES, "norm_ratio_of", "guard_alarms", "guard_rungs")
        self.rows.append({name: event[name] for name in told if name in event})
        self._alarms.update(event.get("guard_alarms", ()))

    def summary(self) -> dict[str, Any]:
        """Return smallest, 5 %, median, 95 % and largest of each figure; and alarms by kind."""
        figures = {name: quantiles(values) for name, values in self._found.items() if values}
        return {**figures, "alarms": dict(self._alarms)}


def quantiles(values: Sequence[float]) -> list[float]:
    """Return the values at `QUANTILES`, the nearest that occurred."""
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in QUANTILES]
