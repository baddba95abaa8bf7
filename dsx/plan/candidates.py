"""Every way of running that a plan considers, with what it does on the line and what it keeps.

Per preset, number of fragments and codec there is one: at the least H of `INTERVALS` at which the
target is reached, or at the largest allowed. tau is as long as a transfer takes alone, and at most
the steps from one launch to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsx.plan.link import Costs, Link
from dsx.plan.model import PlannedModel
from dsx.plan.outer_memory import OuterBytes, outer_bytes
from dsx.plan.predict import Prediction, data_parallel, least_interval, predict_traffic
from dsx.plan.recipes import RECIPES, Codec, Recipe, codecs_for
from dsx.plan.scenario import require_number
from dsx.plan.settings import DATA_PARALLEL, Coding, Settings
from dsx.plan.traffic import Load, Traffic

INTERVALS = (5, 10, 20, 30, 40, 50, 75, 100, 125, 150, 200, 250, 300, 400, 500, 750, 1000)
_FACTOR_OF_BANDWIDTH = 1.01  # to which the least bandwidth is found


@dataclass(frozen=True)
class Question:
    """What is planned for: the model, its step, the line, and what is asked of the method.

    `memory_limit` is in bytes of one accelerator, beside what the inner engine takes where that is
    known; `target` a share of the time; `streams` the connections with which the line was measured.
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

    def __post_init__(self) -> None:
        require_number("step_seconds", self.step_seconds, 1e-6, 1e9)
        require_number("clusters", self.num_clusters, 2, 10**4)
        require_number("target", 100 * self.target, 0.1, 99.99)
        require_number("max_interval", self.max_interval, INTERVALS[0], 10**6)

    @property
    def intervals(self) -> list[int]:
        """H's that are tried."""
        known = [interval for interval in INTERVALS if interval < self.max_interval]
        return [*known, self.max_interval]


@dataclass(frozen=True)
class Candidate:
    """One way of running; `num_fragments` are of each pipeline stage."""

    preset: str
    codec: Codec
    num_fragments: int
    settings: Settings
    prediction: Prediction
    memory: OuterBytes
    is_state_on_host: bool
    is_fitting: bool

    @property
    def recipe(self) -> Recipe:
        """The preset in numbers."""
        return RECIPES[self.preset]

    @property
    def interval(self) -> int:
        """H."""
        return self.settings.interval

    @property
    def bytes_per_day(self) -> float:
        """What one cluster sends in a day."""
        return self.prediction.bytes_per_round * 86400 / self.prediction.round_seconds


class Search:
    """Evaluates candidates; what the same fragments send is worked out once."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._loads: dict[object, list[Load]] = {}
        self._traffic: dict[object, Traffic] = {}
        self._found: dict[object, Prediction] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Yield one per preset, number of fragments and codec."""
        model = self.question.model
        for preset, recipe in RECIPES.items():
            most = min(model.layers_per_stage, self.question.max_interval)
            counts = {min(count, most) for count in recipe.fragment_counts or (1,)}
            for count in sorted(counts):
                for codec in codecs_for(recipe, model.hidden):
                    yield self._best(preset, recipe, count, codec)

    def data_parallel(self) -> Prediction:
        """Return what all gradients in every step would do, layer by layer."""
        recipe = RECIPES["dreamddp"]
        count = min(self.question.model.layers_per_stage, recipe.fragment_counts[0])
        loads = self.loads(recipe, count, Coding())
        traffic = Traffic(DATA_PARALLEL, loads, self.question.num_clusters)
        return data_parallel(traffic, self.question.step_seconds, self.question.link)

    def loads(self, recipe: Recipe, count: int, coding: Coding) -> list[Load]:
        """Return the fragments' parts; only factors depend on the codec."""
        fragmenter = recipe.fragmenter(count)
        key = (fragmenter, coding if coding.type == "low_rank" else None)
        if key not in self._loads:
            self._loads[key] = self.question.model.loads(fragmenter, coding)
        return self._loads[key]

    def predict(
        self, recipe: Recipe, count: int, settings: Settings, link: Link | None = None
    ) -> Prediction:
        """Return what settings do, on the question's line or another one."""
        line, question = link or self.question.link, self.question
        key = (recipe.fragmenter(count), settings, line)
        if key not in self._found:
            traffic = self._traffic_of(recipe, count, settings)
            self._found[key] = predict_traffic(
                settings, traffic, question.step_seconds, line, question.costs
            )
        return self._found[key]

    def at(self, candidate: Candidate, bits_per_second: float) -> Prediction:
        """Return what a candidate does on a line of another rate."""
        line = replace(self.question.link, bits_per_second=bits_per_second)
        return self.predict(candidate.recipe, candidate.num_fragments, candidate.settings, line)

    def least_bits_per_second(self, candidate: Candidate) -> float | None:
        """Return the raw rate at which a candidate reaches the target at its H; None if none does.

        To a percent, from above.
        """
        link, target = self.question.link, self.question.target
        settings = candidate.settings

        def reaches(rate: float) -> bool:
            return self.at(candidate, rate).utilization >= target

        high = link.bits_per_second
        while not reaches(high):
            high *= 8
            if high > 1e15:
                return None
        low = 1.0
        sent, period = candidate.prediction.bytes_per_round, settings.interval
        if settings.schedule != "adaptive":  # which sends less over a worse line
            compute = period * self.question.step_seconds
            low = min(8 * sent * target / compute / link.payload_share, high)
        while high > low * _FACTOR_OF_BANDWIDTH:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if reaches(middle) else (middle, high)
        return high

    def least_interval(self, candidate: Candidate) -> int | None:
        """Return the least H, of any length, at which a candidate reaches the target."""
        question = self.question
        traffic = self._traffic_of(candidate.recipe, candidate.num_fragments, candidate.settings)
        return least_interval(
            candidate.settings,
            traffic,
            question.step_seconds,
            question.link,
            question.costs,
            question.target,
        )

    def _traffic_of(self, recipe: Recipe, count: int, settings: Settings) -> Traffic:
        key = (recipe.fragmenter(count), settings.coding, settings.notes)
        if key not in self._traffic:
            loads = self.loads(recipe, count, settings.coding)
            self._traffic[key] = Traffic(settings, loads, self.question.num_clusters)
        return self._traffic[key]

    def _best(self, preset: str, recipe: Recipe, count: int, codec: Codec) -> Candidate:
        question = self.question
        allowed = [h for h in question.intervals if h >= count or not recipe.is_overlapped]
        low, high = -1, len(allowed) - 1
        while high - low > 1:
            middle = (low + high) // 2
            settings = self._settings(recipe, count, allowed[middle], codec)
            reached = self.predict(recipe, count, settings).utilization >= question.target
            low, high = (low, middle) if reached else (middle, high)
        settings = self._settings(recipe, count, allowed[high], codec)
        memory = outer_bytes(
            recipe, codec.coding, self.loads(recipe, count, codec.coding), question.num_clusters
        )
        is_on_host, is_fitting = _placement(question, memory)
        return Candidate(
            preset,
            codec,
            count,
            settings,
            self.predict(recipe, count, settings),
            memory,
            is_on_host,
            is_fitting,
        )

    def _settings(self, recipe: Recipe, count: int, interval: int, codec: Codec) -> Settings:
        if not recipe.is_overlapped:
            return recipe.settings(interval, 0, codec.coding)
        question = self.question
        settings = recipe.settings(interval, 1, codec.coding)
        traffic = self._traffic_of(recipe, count, settings)
        alone = max(
            traffic.cost(i, question.link, question.costs).alone for i in range(len(traffic.loads))
        )
        steps = math.ceil(alone / question.step_seconds)
        longest = max(1, min(interval // count, interval - 1))
        return replace(settings, overlap_steps=min(max(1, steps), longest))


def _placement(question: Question, memory: OuterBytes) -> tuple[bool, bool]:
    """Return whether outer state goes to the host, and whether the accelerator then holds all."""
    if question.memory_limit is None:
        return False, True
    inner = question.model.inner_bytes or 0
    fits = [
        inner + memory.on_device(is_on_host) <= question.memory_limit
        for is_on_host in (False, True)
    ]
    return (False, True) if fits[0] else (True, fits[1])
