"""When the guard's figures are out of bounds.

Each figure of a fragment is judged as a moving average over rounds, from the fifth on. The bounds
are from runs that went wrong on purpose, beside sound ones (docs/methods/guard.md). What an alarm
leads to is said once for each kind, then again after twice as many rounds each time.

The averages are kept in `History.guard`: equal everywhere, and in checkpoints.

Invariant: plain float64 arithmetic on figures that are equal everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dsx.core.types import History

if TYPE_CHECKING:
    from dsx.method.method import Method

GuardAction = Literal["off", "warn", "step_down"]
WEIGHT, FEWEST = 0.2, 5  # of a new round in the averages; rounds before they are judged
FIRST_PAUSE = 16  # rounds of the fragment until an alarm is told again; then twice as many


@dataclass(frozen=True)
class Bound:
    """What the average of a figure must not pass.

    `of` are the delays that it is for: see `_kind_of`; empty: all. `needs_fine`: not for coarse
    codes, which make means take turns by themselves where what they lost comes a round later.
    """

    kind: str
    figure: str
    is_beyond: str
    low: float | None
    high: float | None
    advice: str
    of: str = ""
    needs_fine: bool = False

    def is_passed(self, average: float) -> bool:
        """Whether an average is beyond it."""
        is_low = self.low is not None and average < self.low
        return is_low or (self.high is not None and average > self.high)


BOUNDS = (
    Bound(
        "gain", "effective_gain", "the outer step is too long for what a round says", None, 5.0,
        "lower outer_optimizer.lr or momentum", of="prompt",
    ),
    Bound(
        "gain", "effective_gain", "the outer step is too long for means that come a round late",
        None, 3.2, "lower outer_optimizer.lr or momentum, or use delay.type='shift'", of="delayed",
    ),
    Bound(
        "gain", "effective_gain", "with own progress kept, the outer step is too long", None, 2.2,
        "lower outer_optimizer.lr or momentum", of="shift",
    ),
    Bound(
        "overshoot", "autocorrelation", "rounds take back what the ones before have done", -0.1,
        None, "lower outer_optimizer.lr or momentum, or apply means sooner (delay)",
        needs_fine=True,
    ),
    Bound(
        "apart", "cluster_cosine", "clusters undo what the others do", -0.02, None,
        "look for the cluster whose loss is unlike the others', and for a sign or a rate that is "
        "wrong there",
    ),
    Bound(
        "far", "norm_ratio", "one cluster sends far more or far less than the others", 0.33, 3.0,
        "compare that cluster's learning rate, data and loss with the others'",
    ),
    Bound(
        "unlike", "norm_ratio", "one cluster's contribution is unlike the others'", 0.74, 1.35,
        "that is so where its data is harder or easier by intent; if it is not meant to be, "
        "compare its data, learning rate and loss with the others'",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Alarm:
    """A figure whose average is out of bounds; `is_told`: it is time to say so."""

    bound: Bound
    value: float
    is_told: bool

    def sentence(self, name: str, round: int, whose: int | None) -> str:
        """Return what is said: fragment, round, number, bound, and what to do."""
        bound, of = self.bound, ""
        if bound.figure == "norm_ratio" and whose is not None:
            of = f" of cluster {whose}"
        is_low = bound.low is not None and self.value < bound.low
        limit, side = (bound.low, "below") if is_low else (bound.high, "above")
        return (
            f"{name}, round {round}: {bound.figure}{of} is {self.value:.3g} on average, {side} "
            f"{limit:g}: {bound.is_beyond}; {bound.advice} (docs/methods/guard.md)"
        )


def judge(
    fragment: int, round: int, figures: Mapping[str, float], history: History, method: Method
) -> list[Alarm]:
    """Take a round's figures into the averages, in `history.guard`, and return what is beyond."""
    state: dict[str, Any] = history.guard
    averages: dict[str, list[float]] = state.setdefault("averages", {})
    told: dict[str, list[int]] = state.setdefault("told", {})
    alarms: dict[str, Alarm] = {}  # by figure: of two bounds, the wider one tells
    delay = _kind_of(method)
    for name in dict.fromkeys(bound.figure for bound in BOUNDS if bound.figure in figures):
        before, count = averages.get(f"{fragment}/{name}", [figures[name], 0])
        average = (1 - WEIGHT) * before + WEIGHT * figures[name]
        averages[f"{fragment}/{name}"] = [average, count + 1]
        if count + 1 < FEWEST:
            continue
        for bound in BOUNDS:
            is_meant = bound.figure == name and bound.of in ("", delay)
            is_meant &= method.codes_are_fine or not bound.needs_fine
            if is_meant and name not in alarms and bound.is_passed(average):
                times, again_at = told.get(bound.kind, [0, 0])
                if is_told := round >= again_at:
                    told[bound.kind] = [times + 1, round + FIRST_PAUSE * 2**times]
                alarms[name] = Alarm(bound, average, is_told)
    return list(alarms.values())


def _kind_of(method: Method) -> str:
    """Return what a method is for the bound on its gain: keeps own progress, is a round late."""
    if method.delay.keeps_unsent:
        return "shift"
    return "delayed" if method.delay.rounds_under_way else "prompt"
