"""What a measured link means for H: the least interval with which methods reach a utilization.

Asked of the simulation of dsx/plan, with fragments that leave and are waited for as a whole, as in
dsx. A coded mean sends more than 2 (C - 1) / C times its codes unless C is 2: all of them to
everybody up to 3 clusters, the means in 8 bits above; `bits` are such that the simulation sends as
much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dsx.comm.reduce import GATHERED_UP_TO
from dsx.plan.dag import utilization
from dsx.plan.scenario import Compute, Scenario, Sync, Wire
from dsx.plan.search import require_target

_INT4_BITS, _INT8_BITS = 4.25, 8.0625  # scales included
_LATENCIES = 3  # of a launch: its announcement, slices, means
_ROUNDS = 1000  # so that the transfers left at the end do not count
_MOST = 10**6


@dataclass(frozen=True)
class Model:
    """Of what the advice is: the model, its step, and the percentage of time spent computing."""

    params: float
    layers: int
    step_seconds: float
    target: float

    def __post_init__(self) -> None:
        require_target(self.target)
        self.compute  # noqa: B018 - checks the others

    @property
    def compute(self) -> Compute:
        """The same for the simulation."""
        return Compute(self.params, self.layers, self.step_seconds)


@dataclass(frozen=True)
class Plan:
    """The least H of one kind of method, or None where no H up to a million is enough."""

    method: str
    bits_per_parameter: float
    interval: int | None
    utilization: float | None


def plans(model: Model, clusters: int, bits_per_second: float, latency: float) -> list[Plan]:
    """Return the least H for blocking and for delayed methods."""
    found: list[Plan] = []
    for method, bits, is_delayed in (
        ("diloco, fp32", 32.0, False),
        ("one round late (eager, diloco_delayed), fp32", 32.0, True),
        ("one round late (dilocox and others), int4", coded_bits(clusters), True),
    ):

        def reached(interval: int, bits: float = bits, is_delayed: bool = is_delayed) -> float:
            delay = interval if is_delayed else 0
            sync = Sync("diloco", interval, delay, granularity="fragment")
            wire = Wire(bits, clusters, _LATENCIES * latency)
            scenario = Scenario(model.compute, sync, wire, _ROUNDS)
            return float(utilization(scenario, np.array([bits_per_second]))[0])

        interval = least(lambda h, of=reached: of(h) >= model.target / 100)
        gives = None if interval is None else reached(interval)
        found.append(Plan(method, bits, interval, gives))
    return found


def coded_bits(clusters: int) -> float:
    """Return the bits per parameter of int4 codes, over `2 (C - 1) / C`."""
    if clusters <= GATHERED_UP_TO:
        return _INT4_BITS * clusters / 2
    return (_INT4_BITS + _INT8_BITS) / 2


def least(is_enough: Callable[[int], bool]) -> int | None:
    """Return the least number, 1 to a million, from which on it is enough, if there is one."""
    high = 1
    while not is_enough(high):
        if high >= _MOST:
            return None
        high = min(2 * high, _MOST)
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
