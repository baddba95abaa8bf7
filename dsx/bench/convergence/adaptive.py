"""Outer settings that follow what the guard sees, as tries of a study: all clusters change alike.

`gain`: the outer rate by the cosine of a mean with the one before, which is that of the loss's
slope along the last outer step: the rule of hypergradient descent in its multiplicative form
(Baydin et al., arXiv:1703.04782). `tested`: H by how far clusters agree, which is the variance of
their pseudo-gradients in the terms of a norm test (Lau et al., arXiv:2406.13936): shorter where
they agree less than they did so far. Where few bits hide their cosine it is a mean's with the one
before, which falls with that variance, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsx.method.changes import INTERVAL, RATE

ADAPTIVE = ("gain", "tested")
_RATE_STEP, _MOST_RATE = 0.02, 2.0  # by one round of a fragment; and in the first rate
_INTERVAL_STEP, _MOST_INTERVAL = 1.05, 2.0
_MEMORY = 0.95  # of the cosine so far, by round


class Adaptive:
    """Of one run; takes the syncs of cluster 0, whose figures are those of all."""

    def __init__(self, variants: Sequence[str], rate: float, interval: int) -> None:
        self._variants = variants
        self._first_rate, self._first_interval = rate, interval
        self.rate, self.interval = rate, float(interval)
        self._cosine: float | None = None

    def note(self, event: Mapping[str, Any]) -> None:
        """Take what a sync's event says."""
        if "autocorrelation" in event:
            wanted = self.rate * (1 + _RATE_STEP * event["autocorrelation"])
            self.rate = within(wanted, self._first_rate, _MOST_RATE)
        cosine = event.get("cluster_cosine", event.get("autocorrelation"))
        if cosine is not None:
            before = cosine if self._cosine is None else self._cosine
            factor = _INTERVAL_STEP if cosine > before else 1 / _INTERVAL_STEP
            if cosine != before:
                self.interval = within(self.interval * factor, self._first_interval, _MOST_INTERVAL)
            self._cosine = _MEMORY * before + (1 - _MEMORY) * cosine

    def changed(self) -> dict[str, float]:
        """Return what all clusters have from the next step on."""
        found: dict[str, float] = {}
        if "gain" in self._variants:
            found[RATE] = self.rate
        if "tested" in self._variants:
            found[INTERVAL] = round(self.interval)
        return found


def within(value: float, first: float, most: float) -> float:
    """Return the nearest value between the first one over `most` and `most` times it."""
    return min(first * most, max(first / most, value))
