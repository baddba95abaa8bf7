"""Which launches are due in a run, by what was asked for: no rank is asked what it has launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Launch = tuple[int, int]  # fragment, step


@dataclass(frozen=True)
class Plan:
    """A schedule: each fragment once in `interval` steps; one after another, or all at once."""

    interval: int
    in_turns: bool

    def due(self, num_fragments: int, last_step: int, stage: Sequence[int] = (0, 1)) -> set[Launch]:
        """Return what is due at the boundaries of steps 1..last_step of a stage (index, count).

        In turns fragment p of P is due at `k*H + floor((p+1)*H/P)`, and a later stage of S by
        `floor(s*H/(P*S))` later (Streaming DiLoCo, arXiv:2501.18512, Sec. 2.1).
        """
        found: set[Launch] = set()
        (index, count), every = stage, self.interval
        for fragment in range(num_fragments):
            first = every
            if self.in_turns:
                first = (fragment + 1) * every // num_fragments
                first += index * every // (num_fragments * count)
            found |= {(fragment, step) for step in range(first, last_step + 1, every)}
        return found
