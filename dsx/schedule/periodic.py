"""Fixed schedules: every fragment every H steps, at once or at offsets spread over the period.

Source: DiLoCo (arXiv:2311.08105, Alg. 1) for `Periodic`; Streaming DiLoCo (arXiv:2501.18512,
Sec. 2.1) for `Streaming`. H is `knobs.interval`, in inner steps, and t is `history.step`.

`Streaming` launches fragment p at `t = k*H + offset_p` with `offset_p = floor((p+1)*H/P)`, so
fragment P-1 coincides with the plain period and the first pseudo-gradient of fragment p covers
`offset_p` steps only. P <= H keeps the offsets distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dsx.types import History, Knobs


class Schedule(Protocol):
    """Pure function of values that are equal on every rank; `interval` is the initial H."""

    @property
    def interval(self) -> int:
        """H in inner steps, the value the first knobs carry."""
        ...

    def validate(self, num_fragments: int) -> None:
        """Raise ValueError if this schedule cannot serve that many fragments."""
        ...

    def due(self, history: History, knobs: Knobs) -> Sequence[int]:
        """Return the fragments to launch at this boundary, in launch order."""
        ...


@dataclass(frozen=True)
class Periodic:
    """All fragments at t = H, 2H, ..."""

    interval: int

    def validate(self, num_fragments: int) -> None:
        """Require H >= 1; any number of fragments can be sent at once."""
        _require_interval(self.interval)

    def due(self, history: History, knobs: Knobs) -> Sequence[int]:
        """Return every fragment at multiples of H, else none."""
        return range(history.num_fragments) if history.step % knobs.interval == 0 else ()


@dataclass(frozen=True)
class Streaming:
    """Fragment p at `k*H + floor((p+1)*H/P)`: one fragment at a time, evenly spread."""

    interval: int

    def validate(self, num_fragments: int) -> None:
        """Require 1 <= P <= H, so that no two fragments share a step."""
        _require_interval(self.interval)
        if num_fragments > self.interval:
            raise ValueError(
                f"fragments.num_fragments={num_fragments} does not fit schedule.interval="
                f"{self.interval}: a streaming schedule needs one inner step per fragment "
                f"or more; use num_fragments <= {self.interval} or interval >= {num_fragments}"
            )

    def due(self, history: History, knobs: Knobs) -> Sequence[int]:
        """Return the fragment whose offset falls on this step, if any."""
        interval, num_fragments = knobs.interval, history.num_fragments
        phase = (history.step - 1) % interval + 1  # offsets lie in 1..H
        return [p for p in range(num_fragments) if (p + 1) * interval // num_fragments == phase]


def _require_interval(interval: int) -> None:
    if interval < 1:
        raise ValueError(f"schedule.interval={interval} must be at least 1 inner step")
