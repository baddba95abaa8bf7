"""What leaves when within one period, for each kind of schedule: as the schedules decide."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dsx.method.schedule.layer_assignment import layer_table
from dsx.plan.closed_forms import num_transmissions
from dsx.plan.scenario import Compute
from dsx.plan.settings import Settings
from dsx.plan.timeline import Cost, Launch
from dsx.plan.traffic import Traffic


def launches_of(
    settings: Settings, traffic: Traffic, transfers: Sequence[Cost], step_seconds: float
) -> list[Launch]:
    """Return a period's launches in the order of their times."""
    steps, loads = settings.interval, traffic.loads
    if settings.schedule == "periodic":
        return [Launch(steps, i) for i in range(len(loads))]
    stages: dict[int, list[int]] = {}
    for index, load in enumerate(loads):
        stages.setdefault(load.stage, []).append(index)
    found: list[Launch] = []
    for number, own in enumerate(stages.values()):
        of_stage = (number, len(stages))
        if settings.schedule == "layerwise":
            found += _in_the_backward(settings, own, transfers, step_seconds, len(stages))
        elif settings.schedule == "streaming":
            found += _spread(own, steps, len(own), of_stage)
        else:
            found += _adaptive(settings, own, transfers, step_seconds, of_stage)
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
    settings: Settings,
    fragments: Sequence[int],
    transfers: Sequence[Cost],
    step_seconds: float,
    stage: tuple[int, int],
) -> list[Launch]:
    """Return N launches (eq. 9) at ceil(j H / N), the stalest fragment that is free first.

    All change alike, since what a run will find is not known before it. A decision at which none is
    free sends nothing, so there may be fewer.
    """
    steps, compute = settings.interval, settings.step_seconds or step_seconds
    alone = [transfers[f].alone for f in fragments]
    seconds = settings.transfer_seconds or sum(alone) / len(alone)
    wanted = num_transmissions(
        steps, len(fragments), settings.gamma / stage[1], compute, max(seconds, 1e-12)
    )
    count = min(wanted, steps)
    lasts = min(max(math.ceil(seconds / compute), settings.overlap_steps + 1), steps)
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
    settings: Settings,
    fragments: Sequence[int],
    transfers: Sequence[Cost],
    step_seconds: float,
    num_stages: int,
) -> list[Launch]:
    """Return DreamDDP's launches of a stage: by the table, each when its own backward is done.

    The table is made of the times that a run would measure, of stages that send at once.
    """
    count = len(fragments)
    node = Compute(1, count, step_seconds).node_seconds
    backward = settings.layer_backward_seconds or tuple(
        node if layer == 0 else 2 * node for layer in range(count)
    )
    seconds = settings.layer_transfer_seconds or tuple(
        max(transfers[f].alone + (num_stages - 1) * transfers[f].line, 1e-12) for f in fragments
    )
    table = layer_table(backward, seconds, settings.interval)
    scale = (2 * count - 1) * node / sum(backward)
    early = [scale * sum(backward[:layer]) for layer in range(count)]
    return [
        Launch(step, fragments[layer], early[layer])
        for step, layers in enumerate(table, start=1)
        for layer in layers
    ]
