"""What the fragments of a model send, and what each transfer takes on a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsx.core.types import Fragment, ParameterShape, Slot
from dsx.method.fragments import Fragmenter, lay_out
from dsx.plan.link import SWAP_ONE_WAYS, Costs, Link
from dsx.plan.payload import (
    GATHERED_UP_TO,
    Parts,
    RoundKind,
    format_of,
    line_bytes,
    parts_of,
    transfer_bytes,
)
from dsx.plan.settings import Coding, Notes, Settings
from dsx.plan.timeline import Cost

Ranks = Sequence[Sequence[Fragment]]


def one_rank(fragmenter: Fragmenter, parameters: Sequence[ParameterShape]) -> list[list[Fragment]]:
    """Return the fragments of a model that one rank of each cluster holds, in model order."""
    wholes = {p.name: p.shape for p in parameters}
    pieces = {name: (shape, 0) for name, shape in wholes.items()}
    return [lay_out(fragmenter.assign(parameters), pieces, wholes)]


def of_sizes(numels: Iterable[int]) -> list[list[Fragment]]:
    """Return fragments of which only the sizes are known: each one matrix of a single row."""
    return [[Fragment(i, 0, (Slot(f"fragment.{i}", (1, n), 0),)) for i, n in enumerate(numels)]]


class Load(NamedTuple):
    """A fragment, as the ranks of a cluster send it: their parts, each so many times."""

    stage: int
    id: int
    parts: tuple[tuple[Parts, int], ...]

    @property
    def numel(self) -> int:
        """Elements of all ranks."""
        return sum(count * parts.numel for parts, count in self.parts)


def loads_of(ranks: Ranks, coding: Coding) -> list[Load]:
    """Return every fragment with its parts on all ranks, in the order of stages and numbers."""
    names: dict[tuple[int, int], set[str]] = {}
    for fragments in ranks:
        for f in fragments:
            names.setdefault((f.stage, f.id), set()).update(s.name for s in f.layout)
    by_id: dict[tuple[int, int], list[tuple[Parts, int]]] = {key: [] for key in sorted(names)}
    for fragments in ranks:
        for f in fragments:
            if f.numel:
                key = (f.stage, f.id)
                by_id[key].append((parts_of(f, coding, len(names[key])), 1))
    return [Load(stage, id, tuple(parts)) for (stage, id), parts in by_id.items()]


class Traffic:
    """What every fragment sends, and what its coding takes: of a model, a coding, C clusters."""

    def __init__(self, settings: Settings, loads: Sequence[Load], num_clusters: int) -> None:
        self.num_clusters = num_clusters
        self._settings = settings
        self.coding = settings.coding
        self.loads = list(loads)
        self.num_stages = len({load.stage for load in loads})
        self.bytes_sent = [_bytes_of(load, settings, num_clusters) for load in loads]
        self._line_bytes = [
            line_bytes(load.parts, settings.coding, settings.notes, num_clusters) for load in loads
        ]
        self._has_notes = settings.notes != Notes()

    def beyond_usual(self, index: int, launches: int) -> list[int]:
        """Return what each cluster sends beyond the usual in a fragment's first launches.

        Low rank has dense rounds, and its first round in factors is cold; further cold ones, after
        a controller has changed the rank, are not counted.
        """
        coding = self.coding
        if coding.type != "low_rank":
            return [0] * self.num_clusters
        every = coding.full_round_every or launches + 1
        numbers = range(1, launches + 1)
        dense = sum(number <= coding.dense_rounds or number % every == 0 for number in numbers)
        counts: dict[RoundKind, int] = {"dense": dense, "cold": int(dense < launches)}
        beyond = [0] * self.num_clusters
        for kind, count in counts.items():
            sent = _bytes_of(self.loads[index], self._settings, self.num_clusters, kind)
            for m, usual in enumerate(self.bytes_sent[index]):
                beyond[m] += count * (sent[m] - usual)
        return beyond

    def cost(self, index: int, link: Link, costs: Costs) -> Cost:
        """Return what a transfer of a fragment takes, on the rank with most of it."""
        parts = [parts for parts, _ in self.loads[index].parts]
        if not parts or self.num_clusters == 1:
            return Cost(0.0, 0.0, 0.0)
        largest = max(parts, key=lambda p: p.numel)
        before, after = coding_seconds(largest, self.coding, self.num_clusters, costs)
        swaps = _swaps(self.coding, self.num_clusters)
        swaps += mean_swaps(self.num_clusters) * self._has_notes
        swap_latency = SWAP_ONE_WAYS * link.latency_seconds
        return Cost(
            before + swap_latency,  # of the announcement
            self._line_bytes[index] / link.payload_bytes_per_second,
            after + swaps * swap_latency,
            costs.blocking_seconds_per_element * largest.numel,
        )


def _bytes_of(
    load: Load, settings: Settings, num_clusters: int, round_kind: RoundKind = "warm"
) -> list[int]:
    """Return what each cluster sends of a fragment, over all of its ranks."""
    total = [0] * num_clusters
    for parts, count in load.parts:
        sent = transfer_bytes(parts, settings.coding, settings.notes, num_clusters, round_kind)
        for m, of_cluster in enumerate(sent):
            total[m] += count * of_cluster
    return total


def mean_swaps(num_clusters: int) -> int:
    """Return the swaps of an exact mean: none alone, one of two clusters, and of more two.

    Two swap all they have; of more, slices go to their owners, and their means to all.
    """
    return min(num_clusters, 3) - 1


def _swaps(coding: Coding, num_clusters: int) -> int:
    """Return a codec's swaps: one after another, each waits for the one before."""
    if coding.type == "dense":
        return mean_swaps(num_clusters)
    if coding.type == "low_rank":
        return 4  # of either factor to its owner, and of its mean to all
    return 1 if coding.type == "top_k" or num_clusters <= GATHERED_UP_TO else 2


def coding_seconds(
    parts: Parts, coding: Coding, num_clusters: int, costs: Costs
) -> tuple[float, float]:
    """Return a transfer thread's seconds before its first byte leaves, and after the last came.

    A copy, a sum and the guard's hash go at the speed of memory; the small rest is left out.
    """
    passes = 4 * parts.numel / costs.copy_bytes_per_second
    if coding.type == "dense":
        return passes, 3 * passes  # from the masters; a sum, divided, the hash
    before, after = passes, 2 * passes
    if coding.type == "low_rank":
        rank_flops = sum(2 * m * n * min(coding.rank or 0, m, n) for m, n in parts.matrices)
        before += rank_flops / costs.flops
        after += 2 * rank_flops / costs.flops
    wire = "int8" if coding.type == "top_k" else format_of(coding.wire).name
    coded = 4 * sum(parts.runs)
    if wire not in costs.formats:  # fp32 is a copy
        return before + coded / costs.copy_bytes_per_second, after
    speeds = costs.formats[wire]
    has_feedback = coding.error_feedback != "none"
    before += coded / (speeds.encode_with_feedback if has_feedback else speeds.encode)
    if coding.type == "top_k" or num_clusters <= GATHERED_UP_TO:
        return before, after + num_clusters * coded / speeds.decode
    mean = costs.formats.get(coding.mean_wire, speeds)
    own = coded / num_clusters
    after += num_clusters * own / speeds.decode + own / mean.encode + coded / mean.decode
    return before, after
