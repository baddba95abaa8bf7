"""When the oracle's fragments are due: the papers' schedules, from step counts alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Clock:
    """What has happened to each fragment."""

    num_fragments: int
    launched: list[int] = field(default_factory=list)
    under_way: list[int] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)  # R_p, infinite before the first
    num_applied: int = 0
    num_rounds: list[int] = field(default_factory=list)  # applied of each

    def __post_init__(self) -> None:
        self.launched = [0] * self.num_fragments
        self.under_way = [0] * self.num_fragments
        self.rate = [math.inf] * self.num_fragments
        self.num_rounds = [0] * self.num_fragments

    def complete(self, p: int, interval: int, mean: dict[str, Tensor]) -> None:
        """Note an applied transfer; R_p = |D_p| / I_p."""
        self.under_way[p] = max(0, self.under_way[p] - 1)
        self.num_applied += 1
        self.num_rounds[p] += 1
        norm = math.sqrt(sum(d.double().square().sum().item() for d in mean.values()))
        self.rate[p] = norm / interval


@dataclass
class Adaptive:
    """CoCoDC's Alg. 2 with constant T_c and T_s."""

    gamma: float
    step_seconds: float
    transfer_seconds: float
    count: int = 0
    epoch: int = 0
    chosen: list[tuple[int, int]] = field(default_factory=list)

    def restart(self, num_fragments: int) -> None:
        """Begin a run: N = P until a transfer has been applied."""
        self.count, self.epoch = num_fragments, 0
        self.chosen = []

    def due(self, step: int, interval: int, clock: Clock) -> list[int]:
        """Decide at epoch + ceil(j H / N): the stalest overdue fragment, else the largest R_p."""
        decisions = [
            self.epoch + math.ceil(j * interval / self.count) for j in range(1, step * self.count)
        ]
        if step not in decisions:
            return []
        eligible = [p for p in range(clock.num_fragments) if self.is_eligible(p, step, clock)]
        if not eligible:
            return []
        overdue = [p for p in eligible if step - clock.launched[p] >= interval]
        if overdue:
            best = sorted(overdue, key=lambda p: (clock.launched[p], p))[0]
        else:
            best = sorted(eligible, key=lambda p: (-clock.rate[p], p))[0]
        self.chosen.append((step, best))
        return [best]

    def is_eligible(self, p: int, step: int, clock: Clock) -> bool:
        """Not under way, and not so by the time a transfer takes."""
        if clock.under_way[p]:
            return False
        if clock.num_applied == 0 or clock.launched[p] == 0:
            return True
        needed = math.ceil(self.transfer_seconds / self.step_seconds)
        return step - clock.launched[p] >= needed

    def end_boundary(self, step: int, interval: int, clock: Clock) -> None:
        """Take a new N, and with it a new epoch, once T_s is known."""
        if clock.num_applied == 0:
            return
        wanted = math.floor(self.gamma * interval * self.step_seconds / self.transfer_seconds)
        count = min(max(clock.num_fragments, wanted), interval)
        if count != self.count:
            self.count, self.epoch = count, step


def due_periodic(step: int, interval: int, count: int) -> Sequence[int]:
    """All fragments at t = H, 2H, ..."""
    return range(count) if step % interval == 0 else ()


def due_streaming(step: int, interval: int, count: int) -> Sequence[int]:
    """Fragment p at t = k H + floor((p+1) H / P)."""
    offsets = [(p + 1) * interval // count for p in range(count)]
    return [p for p in range(count) if step >= offsets[p] and not (step - offsets[p]) % interval]


def due_by_table(table: Sequence[Sequence[int]], step: int) -> Sequence[int]:
    """DreamDDP: a table of layers for H iterations, repeated."""
    return table[(step - 1) % len(table)]
