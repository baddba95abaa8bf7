"""Adaptive rank and H: as pseudo-gradients lose rank, send less and sync sooner.

Source: DiLoCoX (arXiv:2506.21263, Sec. 2.4.3, Alg. 3, window c = 5). The rank r is judged by the
share of the squared norm of the averaged pseudo-gradients that their r leading directions keep:

    kept = sum_{i <= r} lambda_i / |M|_F^2,    lambda: squared singular values, summed over matrices

over the last c rounds, each pooled over all fragments. Mean kept below `target` by more than its
standard error (codecs estimate |M|_F): r grows by half. Else r falls to 1.15 of the directions
that reach the target, if that is below 0.9 r and above what was too little in the last windows.
Then the window starts anew.
H follows the seconds that a round of transfers takes, over those of an inner step, within
[`min_interval`, H_1], once the two differ by more than a quarter. The stages of a pipeline share
the uplink and a period: a round is the transfers of all of them (of the slowest, where they send at
once), and at the end of a period, once all have ended a window, they take one H. Each stage has its
own rank.

Deviation: the paper's formulas did not survive; a rank estimated from the r kept values alone can
only fall, so the full norm is the measure. The leading directions are found by two steps of
subspace iteration from seeded columns, by one owner, which hands the values to all clusters.
A matrix of which a rank holds a part only (a ZeRO shard) is left out of the measurement. With
error feedback a low-rank codec's directions serve what is left of earlier rounds, too: the share
they keep of this round's M is then below that of M's own leading ones, and r settles above what M
alone needs (up to 1.7 times for exponential spectra, 4 times for those that fall as 1/i).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Lt

from dsx.core.checks import require_bounds
from dsx.core.registry import register
from dsx.core.types import Fragment, History, SyncParams
from dsx.method.control.base import Control

if TYPE_CHECKING:
    from torch import Tensor

AtLeastOne = Annotated[int, Ge(1)]
_GROWTH, _SHRINK_BELOW, _MARGIN = 1.5, 0.9, 1.15
_TOLERATED_CHANGE = 0.25
_NOTHING_SEEN: Mapping[str, Any] = {"seen": 0, "kept": [], "needed": [], "pool": [], "pooled": 0}
_WINDOWS_REMEMBERED = 4  # in which a rank that was too low is not taken again


@register("control", "adaptive_rank")
@dataclass(frozen=True)
class AdaptiveRank(Control):
    """Rank and H follow what the last rounds were like: spectra, and the seconds they took.

    It starts from `rank` and stays within [`min_rank`, `max_rank`] and [`min_interval`, H_1].

    `step_seconds` and `round_seconds` (one round of all transfers) fix the times H follows, which
    makes a run reproducible; without them they are measured.
    """

    rank: AtLeastOne
    """The rank to start from, between `min_rank` and `max_rank`."""
    min_rank: AtLeastOne = 4
    """The smallest rank it may set, at least 1."""
    max_rank: AtLeastOne = 2048
    """The largest rank it may set; buffers are made for it."""
    target: Annotated[
        float, Gt(0), Lt(1), "it is the share of the squared norm to keep; 0.95 is a good start"
    ] = 0.95
    """The share of the squared norm that the rank has to keep, between 0 and 1."""
    window: AtLeastOne = 5
    """The rounds that are looked at before each decision, at least 1."""
    min_interval: AtLeastOne = 8
    """The smallest H it may set, at least 1; the largest is `schedule.interval`."""
    step_seconds: Annotated[float | None, Gt(0)] = None
    """The seconds of one inner step; null: measured. Give both times to make a run reproducible."""
    round_seconds: Annotated[float | None, Gt(0)] = None
    """The seconds of one round of all transfers; null: measured."""

    @property
    def uses_seconds(self) -> bool:
        """Unless both times are given."""
        return self.step_seconds is None or self.round_seconds is None

    @property
    def largest_rank(self) -> int:
        """Return `max_rank`."""
        return self.max_rank

    def validate(self, initial: SyncParams) -> None:
        """Require ordered bounds, a target share, and H_min <= H."""
        require_bounds("control", self)
        if self.min_rank > self.max_rank:
            raise ValueError(
                f"control.min_rank={self.min_rank} must be at most control.max_rank="
                f"{self.max_rank}; use min_rank <= {self.max_rank} or a larger max_rank"
            )
        if not self.min_rank <= self.rank <= self.max_rank:
            limit = f">= {self.min_rank}" if self.rank < self.min_rank else f"<= {self.max_rank}"
            raise ValueError(
                f"control.rank={self.rank} must lie between control.min_rank={self.min_rank} and "
                f"control.max_rank={self.max_rank}; use rank {limit}"
            )
        if self.min_interval > initial.interval:
            raise ValueError(
                f"control.min_interval={self.min_interval} must be at most "
                f"schedule.interval={initial.interval}, which H starts from; use min_interval <= "
                f"{initial.interval} or a larger interval"
            )

    def lowest_interval(self, initial: SyncParams) -> int:
        """Return `min_interval`."""
        return self.min_interval

    def moves(self, initial: SyncParams) -> bool:
        """Unless the limits leave one rank and one H."""
        return self.min_rank != self.max_rank or self.min_interval != initial.interval

    def sideband_numel(self, initial: SyncParams) -> int:
        """Return `max_rank` eigenvalues and the squared norm."""
        return self.max_rank + 1

    def measure(self, mean: Tensor, fragment: Fragment, sync_params: SyncParams) -> Tensor:
        """Return the squared singular values within reach of the rank, summed, and |M|_F^2."""
        import torch

        values = torch.zeros(self.max_rank + 1)
        if not torch.isfinite(mean).all():
            return values  # a spectrum of nothing: the transfer is left out of the window
        for slot in fragment.layout:
            if len(slot.shape) >= 2:
                matrix = mean[slot.offset : slot.offset + slot.numel].view(slot.shape[0], -1)
                squares = leading_squares(matrix, sync_params.rank or self.rank)
                values[: len(squares)] += squares
                values[-1] += matrix.square().sum()
        return values

    def decide(
        self,
        measured: Sequence[float],
        launched_with: SyncParams,
        initial: SyncParams,
        history: History,
    ) -> None:
        """Add a transfer's measurements to the window; at its end, move r and H.

        Those of a transfer launched before r moved are left out: they are of the old r. A window
        in which nothing was measured (dense rounds) moves H alone.
        """
        state = history.decisions
        self._begin(state, initial)
        state["seen"] += 1
        total = measured[-1]
        if total > 0 and launched_with.rank == state["rank"]:
            state["captured"] = sum(measured[: state["rank"]]) / total  # the last one, to be shown
            pool = state["pool"] or [0.0] * len(measured)
            state["pool"] = [a + b for a, b in zip(pool, measured, strict=True)]
            state["pooled"] += 1
        if state["seen"] % history.num_fragments == 0:
            self._end_round(state, history.num_fragments)
        if state["seen"] == self.window * history.num_fragments:
            self._end_window(state)
            if "is_ripe" in state:  # of a pipeline, whose stages settle H together
                state["is_ripe"] = True
            else:
                state["interval"] = self.next_interval(state["interval"], initial.interval, history)

    def _begin(self, state: dict[str, Any], initial: SyncParams) -> None:
        if not state:
            state.update(rank=self.rank, interval=initial.interval, too_low=0, windows_since=0)
            state.update(_NOTHING_SEEN)

    def _end_round(self, state: dict[str, Any], num_fragments: int) -> None:
        """Take the measurements of one transfer of every fragment together, if all are there."""
        if state["pooled"] == num_fragments:
            *squares, total = state["pool"]
            state["kept"] = [*state["kept"], sum(squares[: state["rank"]]) / total]
            state["needed"] = [*state["needed"], self._needed(squares, total, state["rank"])]
        state.update(pool=[], pooled=0)

    def _end_window(self, state: dict[str, Any]) -> None:
        """Move the rank, and remember one that was too low for some windows."""
        if state["kept"]:
            kept = fmean(state["kept"]) + _standard_error(state["kept"])
            rank, too_low = state["rank"], state["too_low"]
            state["rank"] = self.next_rank(rank, kept, fmean(state["needed"]), too_low)
            state["windows_since"] += 1
            if state["rank"] > rank:
                state.update(too_low=rank, windows_since=0)
            elif state["windows_since"] >= _WINDOWS_REMEMBERED:
                state["too_low"] = 0
        state.update(_NOTHING_SEEN)

    def proposal(self, initial: SyncParams, history: History) -> Sequence[float] | None:
        """Return H, whether a window has ended, and the seconds of a round and of a step."""
        return [
            float(history.decisions.get("interval", initial.interval)),
            float(history.decisions.get("is_ripe", False)),
            sum(s for s in history.transfer_seconds if s is not None),
            history.step_seconds or 0.0,
        ]

    def settle(
        self,
        stages: Sequence[Sequence[float]],
        takes_turns: bool,
        initial: SyncParams,
        history: History,
    ) -> None:
        """Take one H for all stages: a new one, once each has ended a window."""
        state = history.decisions
        self._begin(state, initial)
        intervals, ripe, rounds, steps = zip(*stages, strict=True)
        interval = int(max(intervals))
        if all(ripe):
            seconds = sum(rounds) if takes_turns else max(rounds)
            interval = self._interval(interval, initial.interval, seconds, max(steps))
        state.update(interval=interval, is_ripe=not all(ripe) and state.get("is_ripe", False))

    def sync_params(self, initial: SyncParams, history: History) -> SyncParams:
        """Return the H and r decided last."""
        state = history.decisions
        return SyncParams(state.get("interval", initial.interval), state.get("rank", self.rank))

    def next_rank(self, rank: int, kept: float, needed: float, too_low: int = 0) -> int:
        """Return the rank after a window that kept and needed so much at the most."""
        if kept < self.target:
            return min(math.ceil(_GROWTH * rank), self.max_rank)
        wanted = max(math.ceil(_MARGIN * needed), self.min_rank)
        return wanted if too_low < wanted < _SHRINK_BELOW * rank else rank

    def next_interval(self, interval: int, largest: int, history: History) -> int:
        """Return the H that one round of transfers hides behind, or the old one if close."""
        measured = sum(s for s in history.transfer_seconds if s is not None)
        return self._interval(interval, largest, measured, history.step_seconds)

    def _interval(
        self, interval: int, largest: int, measured: float, measured_step: float | None
    ) -> int:
        round_seconds = self.round_seconds or measured
        step_seconds = self.step_seconds or measured_step
        if not round_seconds or not step_seconds:
            return interval
        wanted = math.ceil(_MARGIN * round_seconds / step_seconds)
        wanted = min(max(wanted, self.min_interval), largest)
        is_close = abs(wanted - interval) <= _TOLERATED_CHANGE * interval
        return interval if is_close else wanted

    def _needed(self, squares: Sequence[float], total: float, rank: int) -> int:
        """Return how many directions reach the target, or `rank` if all of them do not."""
        reached = 0.0
        for count, square in enumerate(squares[:rank], start=1):
            reached += square
            if reached >= self.target * total:
                return count
        return rank


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def leading_squares(matrix: Tensor, rank: int) -> Tensor:
    """Return the `rank` largest squared singular values of `[m, n]`, descending, about.

    Two steps of subspace iteration from seeded columns; exact once `rank` reaches min(m, n).
    """
    import torch

    matrix = matrix.float()
    rank = min(rank, *matrix.shape)
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(matrix.shape[1], rank, generator=generator).to(matrix.device)
    for _ in range(2):
        basis = torch.linalg.qr(matrix.T @ (matrix @ basis)).Q
    squares = torch.linalg.svdvals(matrix @ basis).square()
    return squares.cpu()
