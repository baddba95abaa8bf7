"""The ladder that a run steps down with `guard.action` "step_down", one rung for an alarm.

    gain      half of the outer rate, twice
    interval  half of H, once
    blocking  means are applied at the boundary of their launch

Too much gain, and rounds that take back what the ones before have done, lead down. Clusters that
undo each other, and one that is unlike the others, do not: its rate, its sign or its data is what
is wrong, which no choice of all of them makes right.

The rungs taken are a list in `History.guard`, from which all else follows: equal everywhere, and
in checkpoints. A run that goes on with another action does not use it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from dsx.core.types import History, SyncParams
from dsx.method.changes import INTERVAL, changed_rule

if TYPE_CHECKING:
    from dsx.method.method import Method
    from dsx.method.outer_optimizer import OuterOptimizer

RUNGS = {"gain": 2, "interval": 1, "blocking": 1}  # in their order, and how often
LEADS_DOWN = ("gain", "overshoot")  # kinds of alarms


class Ladder:
    """What a method can step down to; nothing where its guard does not.

    `left_out` says of each rung that the method cannot have why.
    """

    def __init__(self, method: Method, num_fragments: int | None, num_stages: int = 1) -> None:
        """`num_fragments` is a stage's, None where it is not known yet."""
        self._method = method
        self.is_active = method.guards and method.guard == "step_down"
        self._half = method.schedule.interval // 2
        self.left_out: dict[str, str] = {}
        if self.is_active:
            found = (
                self._without_rate(),
                self._without_half(num_fragments, num_stages),
                self._without_overlap(),
            )
            self.left_out = {rung: why for rung, why in zip(RUNGS, found, strict=True) if why}

    def require_rungs(self) -> None:
        """Raise ValueError where the method is to step down and cannot at all."""
        if self._method.guard != "step_down":
            return
        if not self._method.guards:
            raise ValueError(
                "guard.action='step_down': this method averages parameters in place and takes no "
                "outer step, so there are no figures to judge it by; use guard.action='warn'"
            )
        if len(self.left_out) == len(RUNGS):
            why = "; ".join(self.left_out.values())
            raise ValueError(
                f"guard.action='step_down': there is no step to take ({why}); use "
                "guard.action='warn'"
            )

    def taken(self, history: History) -> Sequence[str]:
        """Return the rungs taken so far, but for those that this method cannot have."""
        rungs: list[str] = history.guard.get("rungs", []) if self.is_active else []
        return [rung for rung in rungs if rung not in self.left_out]

    def outer_optimizer(self, history: History) -> OuterOptimizer:
        """Return the outer rule with the rate that is in force."""
        rule: Any = changed_rule(self._method.outer_optimizer, history.changed)
        count = self.taken(history).count("gain")
        return replace(rule, lr=rule.lr * 0.5**count) if count else rule

    def sync_params(self, history: History) -> SyncParams:
        """Return H as it is in force, and no overlap where that is."""
        method, taken = self._method, self.taken(history)
        params = method.control.sync_params(method.sync_params, history)
        if INTERVAL in history.changed:
            params = replace(params, interval=int(history.changed[INTERVAL]))
        if "interval" in taken:
            params = replace(params, interval=self._half)
        return replace(params, overlap=0) if "blocking" in taken else params

    @property
    def most_overlap(self) -> int:
        """The largest tau whose mean is applied before the next launch, should H be halved."""
        is_fixed = not self.is_active or "interval" in self.left_out
        return self._method.schedule.interval if is_fixed else self._half - 1

    def next_rung(self, history: History) -> str | None:
        """Return the rung below the one that the run is on; None if there is none."""
        taken = self.taken(history)
        left = (r for r, most in RUNGS.items() if taken.count(r) < most and r not in self.left_out)
        return next(left, None)

    def sentence(self, kinds: Collection[str], history: History) -> str:
        """Return what is said of the last rung taken, which alarms of these kinds have led to."""
        rung, H = self.taken(history)[-1], self._method.schedule.interval  # noqa: N806
        rate = getattr(self.outer_optimizer(history), "lr", 0.0)
        does = {
            "gain": f"outer_optimizer.lr is {rate:.3g} from here on",
            "interval": f"schedule.interval is {self._half} from here on, not {H}, and the traffic "
            "twice as much",
            "blocking": "means are applied at the boundary of their launch from here on",
        }[rung]
        above = list(RUNGS)[: list(RUNGS).index(rung)]
        passed = [self.left_out[r] for r in above if r in self.left_out]
        return (
            f"step {history.step}, guard.action='step_down' after {', '.join(sorted(kinds))}: "
            f"{'; '.join([does, *passed])}; "
            f"{'another' if self.next_rung(history) else 'no other'} step is left "
            "(docs/methods/guard.md)"
        )

    def _without_rate(self) -> str:
        rule = self._method.outer_optimizer
        if is_dataclass(rule) and isinstance(getattr(rule, "lr", None), int | float):
            return ""
        return f"no lower rate, as {type(rule).__name__} has no lr"

    def _without_half(self, num_fragments: int | None, num_stages: int) -> str:
        method, half = self._method, self._half
        schedule, steps = method.schedule, method.delay.steps
        if method.control.lowest_interval(method.sync_params) != schedule.interval:
            return "no shorter H, which the controller moves"
        if num_stages > 1 and schedule.takes_turns:
            return "no shorter H, as the stages of a pipeline send one after another"
        if steps != "auto" and steps >= half:
            return f"no shorter H, as delay.steps={steps} is not below half of it"
        try:
            replace(cast(Any, schedule), interval=half).validate(num_fragments)
            method.delay.validate(half)
        except ValueError as error:
            return f"no shorter H: {error}"
        return ""

    def _without_overlap(self) -> str:
        delay = self._method.delay
        if delay.rounds_under_way:
            return "no end of the overlap, as this delay.type applies a mean at a later launch"
        return "" if delay.steps else "no end of an overlap, as there is none"
