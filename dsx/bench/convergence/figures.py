"""What papers report of a loss curve: perplexity, and what a target loss has taken. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def perplexity(loss: float) -> float:
    """Return e to a loss in nats per token; inf where that is beyond a float's range."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def reach(curve: Sequence[Sequence[float]], target: float) -> tuple[float, float] | None:
    """Return the steps and bytes a cluster had taken and sent when the loss first was `target`.

    `curve` has (step, loss, bytes) by step. Between two validations the loss is taken to fall
    evenly, and bytes to rise so; before the first there is nothing. None: it was never reached.
    """
    before: Sequence[float] | None = None
    for point in curve:
        if point[1] <= target:
            if before is None:
                return point[0], point[2]
            share = (before[1] - target) / (before[1] - point[1])
            steps, sent = (before[i] + share * (point[i] - before[i]) for i in (0, 2))
            return steps, sent
        before = point
    return None


def common_target(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the least loss that all runs reach: the worst of their best; nan if all diverged."""
    best = [min((loss for _, loss, _ in row["curve"]), default=math.nan) for row in rows]
    return max((loss for loss in best if math.isfinite(loss)), default=math.nan)


def add_reached(row: dict[str, Any], target: float) -> None:
    """Write `steps_to_target` and `bytes_to_target` into a run's result; None: not reached."""
    reached = reach(row["curve"], target)
    row["steps_to_target"], row["bytes_to_target"] = reached or (None, None)
