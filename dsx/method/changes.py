"""What may change in a run that goes on, for all clusters at one step, and what it changes to.

The changes in force are in `History.changed`, by key: equal everywhere, and in checkpoints. What
reads H or the outer rate takes them from there, by the ladder (ladder.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from dsx.method.method import Method
    from dsx.method.outer_optimizer import OuterOptimizer

INTERVAL, RATE, MOMENTUM = "schedule.interval", "outer_optimizer.lr", "outer_optimizer.momentum"
OF_METHOD = (INTERVAL, RATE, MOMENTUM)


def changed_rule(rule: OuterOptimizer, changed: Mapping[str, float]) -> OuterOptimizer:
    """Return the outer rule with the values that are in force."""
    own = {key.partition(".")[2]: changed[key] for key in (RATE, MOMENTUM) if key in changed}
    return replace(cast(Any, rule), **own) if own else rule


def require_change(
    method: Method,
    changed: Mapping[str, float],
    key: str,
    value: float,
    num_fragments: int,
    num_stages: int,
) -> float:
    """Return what a key of the method is to be, as what it is kept; `changed` is in force.

    ValueError for what the method cannot have, or not in a run that goes on.
    """
    if not math.isfinite(value):
        raise ValueError(f"{key}={value} must be a finite number")
    if key == INTERVAL:
        return _interval(method, changed, value, num_fragments, num_stages)
    rule, name = method.outer_optimizer, key.partition(".")[2]
    if not is_dataclass(rule) or not isinstance(getattr(rule, name, None), int | float):
        raise ValueError(f"{key}: the outer optimizer of this run, {_name(rule)}, has no {name}")
    changed_rule(rule, {**changed, key: value}).validate()
    return float(value)


def _interval(
    method: Method,
    changed: Mapping[str, float],
    value: float,
    num_fragments: int,
    num_stages: int,
) -> int:
    new, schedule = int(value), method.schedule
    if new != value or new < 1:
        raise ValueError(f"{INTERVAL}={value:g} must be a whole number of at least 1")
    if method.control.lowest_interval(method.sync_params) != schedule.interval:
        raise ValueError(f"{INTERVAL}: this run's controller ({_name(method.control)}) moves it")
    if method.guard == "step_down":
        raise ValueError(f"{INTERVAL}: this run's guard moves it (guard.action 'step_down')")
    if num_stages > 1 and schedule.takes_turns:
        raise ValueError(f"{INTERVAL}: the stages of this run's pipeline send one after another")
    old = int(changed.get(INTERVAL, schedule.interval))
    if method.delay.steps == "auto" and 2 * new <= old:
        raise ValueError(
            f"{INTERVAL}={new} is half of {old} or less, and a mean may take as long with "
            f"delay.steps='auto': go down in steps, to {old // 2 + 1} now"
        )
    schedule = replace(cast(Any, schedule), interval=new)
    replace(method, schedule=schedule).validate(num_fragments=num_fragments)
    return new


def _name(choice: object) -> str:
    return type(choice).__name__
