"""What a run of dsx will do on a link: utilization, exposed seconds, bytes, for every method.

    link = Link(1e9, latency_seconds=0.02)
    predict(load_config(path).method, [adapter.fragments], 2.5, link, num_clusters=2)

`ranks` are the fragments of each rank of a cluster *as they travel*: `adapter.fragments`, or for a
low-rank codec under ZeRO the gathers' `wire`. `traffic.one_rank` makes them for a model that one
rank holds, `traffic.of_sizes` where only numbers of elements are known. Bytes are those that a run
counts, in the long run: at the rank a controller starts from, after the dense rounds that a method
begins with. A transfer is as long as its slowest cluster: the one that sends or receives most, in
each exchange round anew.

Left out: that fragments under way at once may have their uneven rounds the other way about, the
first round trips of TCP, the bursts of `tc tbf`, what ranks of one cluster wait for each other, and
the training thread's own work unless `costs.blocking_seconds_per_element` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from dsx.compress.slices import exact_rounds
from dsx.core.types import History
from dsx.method.method import Method
from dsx.method.schedule.periodic import Periodic, Streaming
from dsx.plan.coding import coded_at_once
from dsx.plan.launches import launches_of
from dsx.plan.link import ROUND_ONE_WAYS, Costs, Link
from dsx.plan.published.closed_forms import data_parallel_step_seconds
from dsx.plan.published.scenario import Compute, require_number
from dsx.plan.timeline import Cost, Launch, Timeline
from dsx.plan.traffic import Ranks, Traffic, loads_of
from dsx.plan.variants import with_steps

MOST_STEPS = 10**6


@dataclass(frozen=True)
class Prediction:
    """Of one period of `steps_per_round` inner steps, in the long run.

    `exposed_seconds` are what the period takes beyond its compute; `transfer_seconds` how long the
    link is held, by one transfer after another; `coding_seconds` how long a rank's cores for coding
    are busy, all of them; `bytes_per_round` the payload that the cluster with most to send sends,
    and `bytes_by_cluster` that of each. A period in which all is sent once is a round; `adaptive`
    and `layerwise` may send some fragments more often: `transmissions` counts.
    """

    utilization: float
    round_seconds: float
    exposed_seconds: float
    bytes_per_round: float
    transfer_seconds: float
    steps_per_round: int
    transmissions: int
    bytes_by_cluster: tuple[float, ...]
    coding_seconds: float = 0.0


def predict(
    method: Method,
    ranks: Ranks,
    step_seconds: float,
    link: Link,
    num_clusters: int,
    costs: Costs | None = None,
) -> Prediction:
    """Return what a run does in the long run; ValueError for numbers that make no sense."""
    require_number("step_seconds", step_seconds, 1e-9, 1e9)
    require_number("num_clusters", num_clusters, 1, 10**4)
    traffic = Traffic(method, loads_of(ranks), num_clusters)
    return predict_traffic(method, traffic, step_seconds, link, costs or Costs())


def predict_traffic(
    method: Method, traffic: Traffic, step_seconds: float, link: Link, costs: Costs
) -> Prediction:
    """Return what a run does, its traffic being known; `predict` is what one calls."""
    steps = method.schedule.interval
    transfers = [traffic.cost(i, link, costs) for i in range(len(traffic.loads))]
    method = _with_overlap(method, transfers, step_seconds)
    launches = launches_of(method, traffic, transfers, step_seconds)
    at_once = coded_at_once(method.compression, costs)
    stages = traffic.num_stages
    if at_once is not None:
        at_once *= stages  # ranks of other stages code on cores of their own
    if method.schedule.when is not None:  # applied at the end of the same step
        seconds = _step_by_step(steps, step_seconds, launches, transfers, at_once)
    else:
        assert method.delay.steps != "auto"
        how = method.delay.steps, method.delay.rounds_under_way, at_once
        seconds = Timeline(steps, step_seconds, launches, transfers, *how).period_seconds()
    seconds = max(seconds, steps * step_seconds)
    shares = _shares(method, traffic, launches)
    totals: list[float] = (np.array(shares) @ traffic.bytes_sent).tolist()
    return Prediction(
        utilization=steps * step_seconds / seconds,
        round_seconds=seconds,
        exposed_seconds=seconds - steps * step_seconds,
        bytes_per_round=max(totals),
        transfer_seconds=sum(n * cost.link for n, cost in zip(shares, transfers, strict=True)),
        steps_per_round=steps,
        transmissions=len(launches),
        bytes_by_cluster=tuple(totals),
        coding_seconds=sum(
            n * (cost.coded_before + cost.coded_after)
            for n, cost in zip(shares, transfers, strict=True)
        )
        / (at_once or stages),
    )


def at_interval(method: Method, interval: int) -> Method:
    """Return the same at another H."""
    schedule = replace(cast(Any, method.schedule), interval=interval)
    return replace(method, schedule=schedule)


def _step_by_step(
    steps: int,
    step_seconds: float,
    launches: Sequence[Launch],
    transfers: Sequence[Cost],
    at_once: int | None,
) -> float:
    """Return a period in which every step waits for all that leaves in it: equal steps once."""
    rows: dict[int, list[Launch]] = {}
    for launch in launches:
        rows.setdefault(launch.step, []).append(launch._replace(step=1))
    counts = Counter(tuple(row) for row in rows.values())
    seconds = (steps - len(rows)) * step_seconds
    for row, count in counts.items():
        timeline = Timeline(1, step_seconds, row, transfers, at_once=at_once)
        seconds += count * timeline.period_seconds(0, 1)
    return seconds


def _shares(method: Method, traffic: Traffic, launches: Sequence[Launch]) -> list[float]:
    """Return how often fragments leave in a period; where norms decide of which, all alike."""
    share = [0.0] * len(traffic.loads)
    for launch in launches:
        share[launch.fragment] += 1
    if method.schedule.uses_norms:
        share = [len(launches) / len(share)] * len(share)
    return share


def has_fixed_traffic(method: Method) -> bool:
    """Whether what is sent does not depend on times or values measured in the run."""
    is_held = not method.control.moves(method.sync_params)
    return is_held and type(method.schedule) in (Periodic, Streaming)


def run_bytes(method: Method, ranks: Ranks, num_clusters: int, rounds: int) -> int:
    """Return what the cluster that sends most has sent after a run's first `rounds` rounds.

    With the dense and cold rounds that `bytes_per_round` leaves out. ValueError unless
    `has_fixed_traffic`.
    """
    if not has_fixed_traffic(method):
        raise ValueError(
            "what is sent is known beforehand only where every fragment is sent once a round "
            "(schedule.type periodic or streaming) and no controller moves the rank or H"
        )
    traffic = Traffic(method, loads_of(ranks), num_clusters)
    total = [0] * num_clusters
    for index in range(len(traffic.loads)):
        for number in range(1, rounds + 1):
            for m, sent in enumerate(traffic.sent_in(index, number)):
                total[m] += sent
    return max(total)


def fitting_interval(
    method: Method,
    ranks: Ranks,
    step_seconds: float,
    link: Link,
    num_clusters: int,
    target: float = 1.0,
    costs: Costs | None = None,
) -> int | None:
    """Return the least H at which the utilization reaches `target`; None if none to a million does.

    At 1, the default, nothing is exposed: to a millionth of the period. `costs` beside the line are
    those of docs/compression.md, and of launches none, unless they are given.
    """
    require_number("target", target, 1e-6, 1)
    traffic = Traffic(method, loads_of(ranks), num_clusters)
    return least_interval(method, traffic, step_seconds, link, costs or Costs(), target)


def least_interval(
    method: Method,
    traffic: Traffic,
    step_seconds: float,
    link: Link,
    costs: Costs,
    target: float,
) -> int | None:
    """Return `fitting_interval`, the traffic being known."""
    reached = min(target, 1 - 1e-6)

    def fits(interval: int) -> bool:
        found = predict_traffic(at_interval(method, interval), traffic, step_seconds, link, costs)
        return found.utilization >= reached

    low = _least_allowed(method, traffic) - 1
    high = low + 1
    while not fits(high):
        if high >= MOST_STEPS:
            return None
        low, high = high, min(2 * high, MOST_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _least_allowed(method: Method, traffic: Traffic) -> int:
    """Return the least H that a schedule takes: a step per fragment, and more than tau."""
    per_stage = math.ceil(len(traffic.loads) / traffic.num_stages)
    needs = per_stage if method.schedule.takes_turns else 1
    tau = 1 if method.delay.steps == "auto" else method.delay.steps
    return max(needs, tau + 1)


def _with_overlap(method: Method, transfers: Sequence[Cost], step_seconds: float) -> Method:
    """Return a method with the tau that the longest transfer makes, where the run would say."""
    if method.delay.steps != "auto":
        return method
    together = len(transfers) if isinstance(method.schedule, Periodic) else 1
    history = History(1, transfer_seconds=[together * max(cost.alone for cost in transfers)])
    history.step_seconds = step_seconds
    found = method.delay.overlap(0, method.schedule.interval, history)
    assert found is not None
    return with_steps(method, found)


def data_parallel(
    numels: Sequence[int], num_clusters: int, step_seconds: float, link: Link
) -> Prediction:
    """Return what sending all gradients in every step does, in fp32 as dsx's own transfers.

    Fragment by fragment, of so many elements, in the backward; as `dsx simulate` layer by layer.
    """
    sent = 4 * 2 * (num_clusters - 1) / num_clusters * sum(numels)
    link_seconds = sent / link.payload_bytes_per_second
    compute = Compute(max(sum(numels), 1), len(numels), step_seconds)
    latency = len(exact_rounds(1, num_clusters)) * ROUND_ONE_WAYS * link.latency_seconds
    seconds = data_parallel_step_seconds(compute, link_seconds / len(numels), latency)
    return Prediction(
        step_seconds / seconds, seconds, seconds - step_seconds, sent, link_seconds, 1, 1,
        (sent,) * num_clusters,
    )  # fmt: skip
