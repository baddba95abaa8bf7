"""What a measured link means for H: the least interval with which methods reach a utilization.

Asked of the planner (dsx/plan/predict.py), as `dsx plan` does, for one rank per cluster that codes
at the documented speeds (docs/compression.md), and whose training thread gives a launch and an
apply what `dsx plan` counts (plan/launch_cost.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsx.config.schema import preset
from dsx.method.fragments import WholeModel
from dsx.plan.launch_cost import launch_cost
from dsx.plan.link import Costs, Link
from dsx.plan.model import from_sizes
from dsx.plan.predict import at_interval, fitting_interval, predict
from dsx.plan.published.scenario import Compute, require_number
from dsx.plan.traffic import one_rank

_INT4 = {"type": "quantized", "wire": "int4", "error_feedback": "fp32"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "diloco, fp32": ("diloco", {}),
    "one round late (eager, diloco_delayed), fp32": ("diloco_delayed", {}),
    "one round late (eager, diloco_delayed), int4": ("diloco_delayed", {"compression": _INT4}),
}


@dataclass(frozen=True)
class Model:
    """Of what the advice is: the model, its step, and the percentage of time spent computing."""

    params: float
    layers: int
    step_seconds: float
    target: float

    def __post_init__(self) -> None:
        require_number("target", self.target, 0.1, 99.99)  # as `dsx plan`
        Compute(self.params, self.layers, self.step_seconds)  # which checks them


@dataclass(frozen=True)
class Plan:
    """The least H of one kind of method, or None where no H up to a million is enough."""

    method: str
    interval: int | None
    utilization: float | None


def plans(model: Model, clusters: int, bits_per_second: float, latency: float) -> list[Plan]:
    """Return the least H for blocking and for delayed methods, on a line measured in payload."""
    (shapes,) = from_sizes(model.params, model.layers, None, ranks=1).stages
    ranks = one_rank(WholeModel(), shapes)
    link = Link(bits_per_second, latency, payload_share=1)
    costs = Costs(blocking_seconds_per_element=launch_cost().seconds_per_element)
    found: list[Plan] = []
    for name, (row, choices) in METHODS.items():
        method = preset(row, clusters, **choices)
        interval = fitting_interval(
            method, ranks, model.step_seconds, link, clusters, model.target / 100, costs
        )
        gives = None
        if interval is not None:
            at = at_interval(method, interval)
            gives = predict(at, ranks, model.step_seconds, link, clusters, costs).utilization
        found.append(Plan(name, interval, gives))
    return found
