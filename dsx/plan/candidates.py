"""Every way of running that a plan considers, with what it does on the link and what it keeps.

Per preset, number of fragments and codec there is one: at the least H of `INTERVALS` at which the
target is reached, or at the largest allowed. tau is as long as a transfer takes alone, and at most
the steps from one launch to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsx.compress.base import Dense
from dsx.core.progress import SOON, Progress, as_count
from dsx.method.choices import PRESETS, preset_method
from dsx.method.fragments import ByLayer
from dsx.method.method import Method
from dsx.method.schedule.layerwise import Layerwise
from dsx.method.schedule.periodic import Streaming
from dsx.outer.memory import OuterMemory, predict
from dsx.plan.candidate import Candidate, bytes_on_device
from dsx.plan.launches import require_planned
from dsx.plan.link import Costs, Link
from dsx.plan.model import PlannedModel
from dsx.plan.model_files import require_served
from dsx.plan.predict import (
    MOST_STEPS,
    Prediction,
    at_interval,
    data_parallel,
    least_interval,
    predict_traffic,
)
from dsx.plan.published.scenario import require_number
from dsx.plan.traffic import Load, Traffic
from dsx.plan.variants import (
    LEAST_RANK,
    MOST_LAYERWISE,
    Codec,
    codecs_for,
    fragment_counts,
    launched_less,
    with_backwards,
    with_codec,
    with_fragments,
    with_steps,
)

INTERVALS = (5, 10, 20, 30, 40, 50, 75, 100, 125, 150, 200, 250, 300, 400, 500, 750, 1000)
MOST_LAYERWISE_INTERVAL = 10_000
MOST_CLUSTERS = 10_000
_FACTOR_OF_BANDWIDTH = 1.01  # to which the least bandwidth is found


@dataclass(frozen=True)
class Question:
    """What is planned for: the model, its step, the link, and what is asked of the method.

    `memory_limit` is in bytes of one accelerator, beside what the inner engine takes where that is
    known; `target` a share of the time; `streams` the connections with which the link was measured;
    `coding_cores` the number that a run is to be told, None for what the plan chooses, or for its
    own; `cores_beside` those of a rank that training leaves, if that is known.
    """

    model: PlannedModel
    step_seconds: float
    link: Link
    num_clusters: int
    target: float = 0.95
    costs: Costs = Costs()
    max_interval: int = 1000
    memory_limit: int | None = None
    streams: int = 1
    coding_cores: int | None = None
    cores_beside: int | None = None

    def __post_init__(self) -> None:
        require_number("step_seconds", self.step_seconds, 1e-6, 1e9)
        require_number("clusters", self.num_clusters, 2, MOST_CLUSTERS)
        require_number("target", 100 * self.target, 0.1, 99.99)
        require_number("max_interval", self.max_interval, INTERVALS[0], 10**6)

    def intervals(self, most: int) -> list[int]:
        """Return H's that are tried, up to `most`."""
        return [*(interval for interval in INTERVALS if interval < most), most]


class Search:
    """Evaluates candidates; what the same fragments send is worked out once.

    `left_out` says of each preset that no plan can be made for why that is.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.left_out: list[str] = []
        self._known: dict[object, Any] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Yield one per preset, number of fragments and codec; says how far it is, if it lasts."""
        asked = [*self._asked()]
        progress = Progress("candidates", len(asked), True, first_seconds=SOON, shown=as_count)
        for preset, method, count, codec in asked:
            yield self._best(preset, with_fragments(method, count), count, codec)
            progress.moved(1)

    def _asked(self) -> Iterator[tuple[str, Method, int, Codec]]:
        """Yield what candidates are made of: a preset, its method, fragments and a codec."""
        question = self.question
        most = min(question.model.layers_per_stage, question.max_interval)
        for preset in PRESETS:
            try:
                method = preset_method(preset, question.num_clusters)
                require_planned(method)
                if question.model.files is not None:
                    require_served(method, question.model.files.cluster)
                    method = with_backwards(method, question.model.files.micro_batches)
            except ValueError as error:
                self.left_out.append(f"{preset} is left out: {error}")
                continue
            if _most_interval(method, question) < question.max_interval:
                self.left_out.append(f"{preset} is planned with H up to {MOST_LAYERWISE_INTERVAL}")
            codecs = codecs_for(method, question.model.hidden)
            if not codecs and question.model.hidden is not None:
                self.left_out.append(
                    f"{preset} is left out: its factors have a rank of {LEAST_RANK} or more, and a "
                    f"width of {question.model.hidden} allows {question.model.hidden // 4}"
                )
            for count in fragment_counts(method, most):
                for codec in codecs:
                    yield preset, method, count, codec

    def data_parallel(self) -> Prediction:
        """Return what all gradients in every step would do, layer by layer."""
        question = self.question
        count = min(question.model.layers_per_stage, MOST_LAYERWISE)
        loads = question.model.loads(ByLayer(count, "sequential"), Dense())
        numels = [load.numel for load in loads]
        clusters, link = question.num_clusters, question.link
        return data_parallel(numels, clusters, question.step_seconds, link)

    def loads(self, method: Method) -> list[Load]:
        """Return the fragments' shares; the codec matters where it needs whole matrices."""
        compression = method.compression
        kind = compression if compression.needs_whole_matrices else None
        return self._once(
            ("loads", method.fragments, kind),
            lambda: self.question.model.loads(method.fragments, compression),
        )

    def predict(
        self,
        method: Method,
        link: Link | None = None,
        cores: int | None = None,
        slowdown: float = 1.0,
    ) -> Prediction:
        """Return what a method does, on the question's link and cores or on others.

        Coding takes `slowdown` times as long as the question says.
        """
        question = self.question
        link, costs = link or question.link, self._costs(cores, slowdown)
        delay = method.delay.steps, method.delay.rounds_under_way
        return self._once(
            ("prediction", _seen_by_link(method), method.schedule, delay, link, cores, slowdown),
            lambda: predict_traffic(
                method, self._traffic_of(method), question.step_seconds, link, costs
            ),
        )

    def _costs(self, cores: int | None, slowdown: float = 1.0) -> Costs:
        """Return the question's, on so many cores, each so much slower; None: as it says."""
        costs = self.question.costs
        if cores is None and slowdown == 1:
            return costs
        told = costs.cores if cores is None else cores
        return self._once(
            ("costs", cores, slowdown), lambda: replace(costs.slower(slowdown), cores=told)
        )

    def at(self, candidate: Candidate, bits_per_second: float) -> Prediction:
        """Return what a candidate does on a link of another rate."""
        link = replace(self.question.link, bits_per_second=bits_per_second)
        return self.predict(candidate.method, link, candidate.coding_cores)

    def least_bits_per_second(self, candidate: Candidate) -> float | None:
        """Return the raw rate at which a candidate reaches the target at its H; None if none does.

        To a percent, from above.
        """
        link, target = self.question.link, self.question.target

        def reaches(rate: float) -> bool:
            return self.at(candidate, rate).utilization >= target

        high = link.bits_per_second
        while not reaches(high):
            high *= 8
            if high > 1e15:
                return None
        low = 1.0
        if not candidate.method.schedule.uses_norms:  # which sends less over a worse link
            compute = candidate.interval * self.question.step_seconds
            sent = 8 * candidate.prediction.bytes_per_round
            low = min(max(sent * target / compute / link.payload_share, 1.0), high)
        while high > low * _FACTOR_OF_BANDWIDTH:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if reaches(middle) else (middle, high)
        return high

    def least_interval(self, candidate: Candidate) -> int | None:
        """Return the least H, of any length, at which a candidate reaches the target."""
        question, traffic = self.question, self._traffic_of(candidate.method)
        return least_interval(
            candidate.method,
            traffic,
            question.step_seconds,
            question.link,
            self._costs(candidate.coding_cores),
            question.target,
        )

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _traffic_of(self, method: Method) -> Traffic:
        return self._once(
            ("traffic", _seen_by_link(method)),
            lambda: Traffic(method, self.loads(method), self.question.num_clusters),
        )

    def _best(self, preset: str, method: Method, count: int, codec: Codec) -> Candidate:
        question, method = self.question, with_codec(method, codec)
        needs = count if method.schedule.takes_turns else 1
        allowed = [h for h in question.intervals(_most_interval(method, question)) if h >= needs]
        if method.schedule.interval == 1:  # a method of every step, as data parallel is
            allowed = [1]
        best, prediction = self._enough(method, count, allowed)
        memory, contributions = self._memory(best, is_on_accelerator=True)
        is_on_host, is_fitting = self._placement(memory, contributions)
        if is_on_host:
            memory, contributions = self._memory(best, is_on_accelerator=False)
        return Candidate(
            preset, codec, count, _in_bounds(best), prediction, memory, contributions,
            is_on_host, is_fitting,
        )  # fmt: skip

    def _enough(
        self, method: Method, count: int, allowed: Sequence[int]
    ) -> tuple[Method, Prediction]:
        """Return a method that reaches the target at some H and rate of launches, or the last."""
        stages, steps = self._traffic_of(method).num_stages, self._transfer_steps(method)
        best = method
        for often in launched_less(method, steps, stages):
            best = self._least(often, count, allowed)
            if self.predict(best).utilization >= self.question.target:
                break
        return best, self.predict(best)

    def _least(self, method: Method, count: int, allowed: Sequence[int]) -> Method:
        """Return a method at the least H at which the target is reached, or the largest."""
        low, high = -1, len(allowed) - 1
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._at(method, count, allowed[middle])
            reached = self.predict(tried).utilization >= self.question.target
            low, high = (low, middle) if reached else (middle, high)
        return self._at(method, count, allowed[high])

    def _at(self, method: Method, count: int, interval: int) -> Method:
        """Return a method at an H, and at the tau that goes with it."""
        method = at_interval(method, interval)
        if not method.delay.steps:
            return method
        steps = math.ceil(max(self._transfer_steps(method)))
        until_next = min(interval // count, interval - 1)
        longest = max(1, interval // 2 if method.delay.uses_seconds else until_next)
        return with_steps(method, min(max(1, steps), longest))

    def _transfer_steps(self, method: Method) -> list[float]:
        """Return how many steps each fragment's transfer takes on an idle link."""
        question, traffic = self.question, self._traffic_of(method)
        costs = [traffic.cost(i, question.link, question.costs) for i in range(len(traffic.loads))]
        return [cost.alone / question.step_seconds for cost in costs]

    def _memory(self, method: Method, is_on_accelerator: bool) -> tuple[OuterMemory, int]:
        """Return the bytes of the rank that holds most, and those of one boundary's launches."""
        loads = self.loads(method)
        fragments, on_the_wire = self.question.model.fullest_rank(loads)
        num_tensors = [load.num_tensors for load in loads if load.stage == on_the_wire[0].stage]
        clusters = self.question.num_clusters
        own = fragments, num_tensors, on_the_wire
        memory = predict(method, *own, clusters, 0, is_on_accelerator)
        sizes = [fragment.numel for fragment in fragments]
        together = max(sizes) if isinstance(method.schedule, Streaming) else sum(sizes)
        return memory, 4 * together

    def _placement(self, memory: OuterMemory, contributions: int) -> tuple[bool, bool]:
        """Return whether outer state goes to the host, and if the accelerator then holds all."""
        limit = self.question.memory_limit
        if limit is None:
            return False, True
        inner = self.question.model.inner_bytes or 0
        fits = [
            inner + bytes_on_device(memory, contributions, is_on_host) <= limit
            for is_on_host in (False, True)
        ]
        return (False, True) if fits[0] else (True, fits[1])


def _most_interval(method: Method, question: Question) -> int:
    """Return the largest H that is tried; a table of each step's layers is made for some."""
    is_table = isinstance(method.schedule, Layerwise)
    return min(question.max_interval, MOST_LAYERWISE_INTERVAL if is_table else MOST_STEPS)


def _seen_by_link(method: Method) -> tuple[object, ...]:
    """Return all of a method that what its transfers hold depends on."""
    flags = method.uses_seconds, method.schedule.uses_norms
    codes = method.encodes_at_launch, method.waits_for_codes
    return method.fragments, method.compression, method.control, method.staleness, flags, codes


def _in_bounds(method: Method) -> Method:
    """Return a method whose controller may start at its H."""
    control: Any = method.control
    if control.lowest_interval(method.sync_params) > method.schedule.interval:
        control = replace(control, min_interval=method.schedule.interval)
    return replace(method, control=control)
