"""What `dsx bench e2e` runs on a line: every preset's "dsx" block, with H and tau by the planner.

All but those of every step have the same H: the least whose transfers of the whole model in fp32,
applied one round late, fit under the H steps of a line that is slower by the margin. Blocking
presets hide nothing under it. Where fragments are applied tau steps later, tau is the least that
hides them. dilocox sends factors from the first round on, as after its dense rounds, and its
controller is held at their rank and that H: what is measured is its long run, in few rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsx.config.schema import resolve_method
from dsx.core.types import ParameterShape
from dsx.method.method import Method
from dsx.plan.link import Link
from dsx.plan.predict import (
    Prediction,
    fitting_interval,
    has_fixed_traffic,
    predict,
    run_bytes,
)
from dsx.plan.traffic import one_rank

# what training waits for: transfers, or codes of every step
_WAITING = ("local_sgd", "slowmo", "diloco", "opendiloco", "dreamddp", "plsgd_enp", "cocktail_sgd")
_OF_EVERY_STEP = ("cocktail_sgd",)
_WITH_DELAY_STEPS = ("streaming_diloco", "cocodc")
_RANK_SHARE = 4  # the rank is a quarter of the longest of the matrices' shorter sides
LEAST_INTERVAL = 10  # a step for every fragment, and periods long enough to be timed
_OUTER_RATES = {  # for tens of rounds; the presets' own momentum needs hundreds
    "slowmo": {"lr": 0.7, "momentum": 0.5},
    "diloco": {"lr": 0.7, "momentum": 0.5},
    "opendiloco": {"lr": 0.7, "momentum": 0.5},
    "streaming_diloco": {"lr": 0.7, "momentum": 0.5},
    "cocodc": {"lr": 0.7, "momentum": 0.5},
    "eager": {"lr": 0.7, "momentum": 0.0},
    "eager_2": {"lr": 0.5, "momentum": 0.0},
    "eager_fp4": {"lr": 0.7, "momentum": 0.0},
    "diloco_delayed": {"lr": 0.4, "momentum": 0.5},
    "dilocox": {"lr": 0.4, "momentum": 0.5},
    "co2": {"lr": 0.4, "momentum": 0.2},
}


@dataclass(frozen=True)
class Situation:
    """A model that computes a step in `step_seconds`, on a line between clusters."""

    parameters: Sequence[ParameterShape]
    step_seconds: float
    link: Link
    num_clusters: int

    def slower(self, margin: float) -> Situation:
        """Return the same on a line that takes `margin` times as long."""
        link = replace(self.link, bits_per_second=self.link.bits_per_second / margin)
        return replace(self, link=link)


@dataclass(frozen=True)
class Plan:
    """A preset as it is run; `block` is the "dsx" block without its "clusters".

    `interval` is the H of all, by which a run is measured, whether or not it is the method's own.
    """

    name: str
    block: dict[str, Any]
    method: Method
    interval: int

    @property
    def is_overlapped(self) -> bool:
        """Whether transfers have steps to hide behind."""
        return self.name not in _WAITING

    def predict(self, situation: Situation) -> Prediction:
        """Return what the planner says."""
        return _predict(self.method, situation)

    def bytes_sent(self, situation: Situation, steps: int) -> int | None:
        """Return the planner's payload of a whole run; None where measurements decide."""
        if not has_fixed_traffic(self.method):
            return None
        ranks = one_rank(self.method.fragments, situation.parameters)
        rounds = steps // self.method.schedule.interval
        return run_bytes(self.method, ranks, situation.num_clusters, rounds)


def plan_presets(names: Sequence[str], situation: Situation, margin: float) -> list[Plan]:
    """Return how each preset is run; ValueError if one fits under no number of steps."""
    interval = planned_interval(situation, margin)
    return [plan_preset(name, interval, situation, margin) for name in names]


def planned_interval(situation: Situation, margin: float) -> int:
    """Return the H of all presets; ValueError if there is none."""
    return max(_fit({"preset": "diloco_delayed"}, situation.slower(margin)), LEAST_INTERVAL)


def plan_preset(
    name: str,
    interval: int,
    situation: Situation,
    margin: float,
    choices: Mapping[str, Any] | None = None,
) -> Plan:
    """Return how a preset is run with an H, and with further `choices` for its block."""
    own = 1 if name in _OF_EVERY_STEP else interval
    block: dict[str, Any] = {"preset": name, "schedule": {"interval": own}}
    if name in _OUTER_RATES:
        block["outer_optimizer"] = _OUTER_RATES[name]
    if name == "dilocox":
        block |= _after_dense_rounds(interval, situation.parameters)
    block.update(choices or {})
    try:
        one_rank(_resolve(block, situation).fragments, situation.parameters)
    except ValueError as error:
        raise ValueError(f"{name} does not go with this shape: {error}") from error
    if name in _WITH_DELAY_STEPS and "delay" not in block:
        block["delay"] = {"steps": _least_delay(block, situation.slower(margin))}
    return Plan(name, block, _resolve(block, situation), interval)


def _after_dense_rounds(interval: int, parameters: Sequence[ParameterShape]) -> dict[str, Any]:
    """Return what lets dilocox send factors of one rank at one H, from its first round on."""
    rank = max(min(p.shape) for p in parameters if len(p.shape) > 1) // _RANK_SHARE
    held = {"rank": rank, "min_rank": rank, "max_rank": rank, "min_interval": interval}
    return {"control": held, "compression": {"dense_rounds": 0}}


def _fit(block: dict[str, Any], situation: Situation) -> int:
    method = _resolve(block, situation)
    ranks = one_rank(method.fragments, situation.parameters)
    found = fitting_interval(
        method, ranks, situation.step_seconds, situation.link, situation.num_clusters
    )
    if found is None:
        raise ValueError(f"{block['preset']} fits under no number of steps on this line")
    return found


def _least_delay(block: dict[str, Any], situation: Situation) -> int:
    """Return the least tau that hides a fragment's transfer."""
    interval = block["schedule"]["interval"]
    for steps in range(1, interval):
        method = _resolve({**block, "delay": {"steps": steps}}, situation)
        if _predict(method, situation).utilization > 1 - 1e-6:
            return steps
    raise ValueError(f"no delay below {interval} steps hides the transfers of {block['preset']}")


def _predict(method: Method, situation: Situation) -> Prediction:
    ranks = one_rank(method.fragments, situation.parameters)
    return predict(method, ranks, situation.step_seconds, situation.link, situation.num_clusters)


def _resolve(block: dict[str, Any], situation: Situation) -> Method:
    axes = {key: value for key, value in block.items() if key != "preset"}
    return resolve_method(block["preset"], axes, situation.num_clusters)[0]
