"""The least bandwidth at which a utilization is reached; from the grid of the papers, or exactly.

Utilization grows with bandwidth: all that it depends on are sums and maxima of transfer times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsx.plan.published.closed_forms import least_bits_per_second
from dsx.plan.published.dag import elapsed_seconds, utilization
from dsx.plan.published.scenario import Scenario

PAPER_GRID_GBPS = np.logspace(-1, 3, 50)
_TOLERANCE = 1e-6
_POINTS = 64
_GBPS = 1e9


class Found(NamedTuple):
    """Gbit/s, or None and why there is no answer."""

    gbps: float | None
    note: str = ""


def require_target(percent: float) -> None:
    """Raise ValueError unless it is a utilization that a finite bandwidth can give."""
    if not 0 < percent < 100:
        nearest = 1 if percent <= 0 else 99
        raise ValueError(
            f"target={percent:g} must be a percentage above 0 and below 100; try {nearest}"
        )


def on_paper_grid(scenario: Scenario, percents: Sequence[float]) -> list[Found]:
    """Return what Streaming DiLoCo and Eager Updates print: the last grid point below the target.

    Rounded as there: to two digits, then to one.
    """
    reached = utilization(scenario, PAPER_GRID_GBPS * _GBPS)
    found: list[Found] = []
    for percent in percents:
        require_target(percent)
        num_below = int(np.count_nonzero(reached < percent / 100))
        if num_below == 0:
            found.append(Found(None, "reached at the grid's first point, 0.1 Gbit/s"))
        elif num_below == len(PAPER_GRID_GBPS):
            found.append(Found(None, "not reached at the grid's last point, 1000 Gbit/s"))
        else:
            last = round(float(PAPER_GRID_GBPS[num_below - 1]), 2)
            found.append(Found(float(f"{last:.1f}")))
    return found


def exactly(scenario: Scenario, percents: Sequence[float]) -> list[Found]:
    """Return the least bandwidths up to 1e-6 of themselves, by bisection in many parts at once.

    The lower end is what conservation asks for. Transfers lie on any chain of waits at most once,
    so the time lost to bandwidth is at most their sum, which gives the upper end.
    """
    for percent in percents:
        require_target(percent)
    targets = np.array([percent / 100 for percent in percents])
    without_bytes = float(elapsed_seconds(scenario, np.array([np.inf]))[0])
    allowed = scenario.rounds * scenario.compute_seconds / targets
    is_reachable = allowed > without_bytes * (1 + _TOLERANCE)
    low = np.array([least_bits_per_second(scenario, target) for target in targets])
    slack = np.where(is_reachable, allowed - without_bytes, np.inf)
    high = scenario.rounds * scenario.bits_per_round / slack
    high = np.where(is_reachable, np.maximum(high, low) * (1 + _TOLERANCE / 4), low)
    while np.any(high > low * (1 + _TOLERANCE)):
        points = np.geomspace(low, high, _POINTS)
        is_below = utilization(scenario, points.ravel()).reshape(points.shape) < targets
        at = np.clip(np.count_nonzero(is_below, axis=0), 1, _POINTS - 1)
        columns = np.arange(len(targets))
        low, high = points[at - 1, columns], points[at, columns]
    at_best = scenario.rounds * scenario.compute_seconds / without_bytes
    note = f"out of reach: {100 * at_best:.2f} % on a line of any bandwidth"
    return [
        Found(float(bits) / _GBPS) if reachable else Found(None, note)
        for bits, reachable in zip(high, is_reachable, strict=True)
    ]
