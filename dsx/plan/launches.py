"""What leaves when within one period, for each kind of schedule: as the schedules decide."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dsx.method.method import Method
from dsx.method.schedule.adaptive_transmission import AdaptiveTransmission
from dsx.method.schedule.layerwise import Layerwise
from dsx.method.schedule.periodic import Periodic, Streaming
from dsx.plan.published.scenario import Compute
from dsx.plan.timeline import Cost, Launch
from dsx.plan.traffic import Traffic

PLANNED = (Periodic, Streaming, AdaptiveTransmission, Layerwise)


def require_planned(method: Method) -> None:
    """Raise ValueError, naming it, for a schedule of which no plan knows when it sends."""
    if type(method.schedule) not in PLANNED:  # a class derived from one sends when it likes
        known = ", ".join(kind.__name__ for kind in PLANNED)
        raise ValueError(
            f"schedule {type(method.schedule).__name__}: a plan knows when {known} send, and not "
            "when this one does; run it, and read what it does from its records"
        )


def launches_of(
    method: Method, traffic: Traffic, transfers: Sequence[Cost], step_seconds: float
) -> list[Launch]:
    """Return a period's launches in the order of their times; ValueError if none can be told."""
    require_planned(method)
    schedule, loads = method.schedule, traffic.loads
    steps = schedule.interval
    if isinstance(schedule, Periodic):
        return [Launch(steps, i) for i in range(len(loads))]
    stages: dict[int, list[int]] = {}
    for index, load in enumerate(loads):
        stages.setdefault(load.stage, []).append(index)
    found: list[Launch] = []
    for number, own in enumerate(stages.values()):
        of_stage = (number, len(stages))
        if isinstance(schedule, Layerwise):
            found += _in_the_backward(schedule, own, transfers, step_seconds, len(stages))
        elif isinstance(schedule, AdaptiveTransmission):
            delay = method.delay.steps
            assert delay != "auto"  # a prediction has made a number of it
            found += _adaptive(schedule, delay, own, transfers, step_seconds, of_stage)
        else:
            found += _spread(own, steps, len(own), of_stage)
    return sorted(found, key=lambda launch: (launch.step, -launch.early))


def _spread(
    fragments: Sequence[int], steps: int, count: int, stage: tuple[int, int]
) -> list[Launch]:
    """Return `count` launches at floor(j H / count), one fragment after another.

    Stages are shifted; what falls beyond the period belongs to the next one's beginning.
    """
    shift = stage[0] * steps // (count * stage[1])
    found: list[Launch] = []
    for j in range(1, count + 1):
        step = (j * steps // count + shift - 1) % steps + 1
        found.append(Launch(step, fragments[(j - 1) % len(fragments)]))
    return found


def _adaptive(
    schedule: AdaptiveTransmission,
    delay: int,
    fragments: Sequence[int],
    transfers: Sequence[Cost],
    step_seconds: float,
    stage: tuple[int, int],
) -> list[Launch]:
    """Return N launches (eq. 9) at ceil(j H / N), the stalest fragment that is free first.

    All change alike, since what a run will find is not known before it. A decision at which none is
    free sends nothing, so there may be fewer.
    """
    steps, compute = schedule.interval, schedule.step_seconds or step_seconds
    alone = [transfers[f].alone for f in fragments]
    seconds = schedule.transfer_seconds or sum(alone) / len(alone)
    fitting = math.floor(schedule.gamma / stage[1] * steps * compute / max(seconds, 1e-12))
    count = min(max(len(fragments), fitting), steps)
    lasts = min(max(math.ceil(seconds / compute), delay + 1), steps)
    shift = stage[0] * steps // (count * stage[1])
    launched = {f: -lasts for f in fragments}
    found: list[Launch] = []
    periods = 3  # of which the last one shows the long run
    for j in range(1, periods * count + 1):
        step = -(-j * steps // count)
        free = [f for f in fragments if step - launched[f] >= lasts]
        if free:
            chosen = min(free, key=lambda f: launched[f])
            launched[chosen] = step
            if j > (periods - 1) * count:
                at = (step - (periods - 1) * steps + shift - 1) % steps + 1
                found.append(Launch(at, chosen))
    return found


def _in_the_backward(
    schedule: Layerwise,
    fragments: Sequence[int],
    transfers: Sequence[Cost],
    step_seconds: float,
    num_stages: int,
) -> list[Launch]:
    """Return DreamDDP's launches of a stage: by the table, each when its own backward is done.

    The table is made of the times that a run would measure, of stages that send at once: only the
    last micro-batch's backward launches, and each takes one part in M + stages - 1 of a step.
    """
    count = len(fragments)
    parts = schedule.backwards + num_stages - 1
    node = Compute(1, count, step_seconds / parts).node_seconds
    backward = schedule.backward_seconds or tuple(
        node if layer == 0 else 2 * node for layer in range(count)
    )
    seconds = schedule.transfer_seconds or tuple(
        max(transfers[f].alone + (num_stages - 1) * transfers[f].link, 1e-12) for f in fragments
    )
    table = schedule.table(backward, seconds, schedule.interval)
    scale = (2 * count - 1) * node / sum(backward)
    early = [scale * sum(backward[:layer]) for layer in range(count)]
    return [
        Launch(step, fragments[layer], early[layer])
        for step, layers in enumerate(table, start=1)
        for layer in layers
    ]
