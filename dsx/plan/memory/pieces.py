"""Which masters each rank of a planned stage synchronises, cut as the inner engine cuts them.

ZeRO-3 cuts each parameter evenly; ZeRO-1 and 2 all parameters of an optimizer's group in a row, as
the model has them; Megatron's distributed optimizer a buffer of each model chunk, last parameter
first, each beginning at a multiple of 64 elements, with the tied embedding of a pipeline in a
bucket of its own (gradients that are not reduced beside the backward, so one bucket of the rest).
Where masters are not sharded, every fragment is divided among the ranks that hold it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from math import lcm
from typing import NamedTuple

from dsx.core.types import ParameterShape, Stage
from dsx.plan.deepspeed_experts import in_groups, number_of
from dsx.plan.gpt_shapes import GPT, Weight
from dsx.plan.model_files import Cluster
from dsx.plan.stage_weights import copies_before, stage_weights

Pieces = Mapping[str, tuple[tuple[int, ...], int]]
_PARAMETER_AT, _BUCKET_OF = 64, 128  # elements: megatron/core/distributed/param_and_grad_buffer.py
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_COPY = "output_layer.weight"


class Held(NamedTuple):
    """What ranks hold alike of a stage, of which this one is the `rank`-th of `ranks`.

    `shapes` in the model's order; `served` are the names of those that it synchronises, where the
    rest is another rank's or another stage's.
    """

    shapes: Sequence[ParameterShape]
    served: AbstractSet[str]
    rank: int
    ranks: int


class _Row(NamedTuple):
    """Elements that ranks cut evenly: where parameters begin among them, and how many there are."""

    begins: Sequence[tuple[str, int]]
    end: int


def held_by_rank(model: GPT, cluster: Cluster, stage: Stage) -> list[tuple[Held, Held]]:
    """Return the dense weights and the experts that each rank of the stage holds.

    What tensor ranks hold alike is served by the first one.
    """
    weights = stage_weights(model, cluster, stage)
    copies = [*copies_before(model, cluster, stage)]
    dense: list[tuple[list[ParameterShape], frozenset[str]]] = []
    for tensor in range(cluster.tensor):
        own = [
            (weight.on((tensor, cluster.tensor)), tensor == 0 or weight.split is not None)
            for weight in weights
            if not weight.is_expert
        ]
        served = frozenset(shape.name for shape, is_served in own if is_served)
        dense.append(([*copies, *(shape for shape, _ in own)], served))
    experts: dict[tuple[int, int], tuple[list[ParameterShape], frozenset[str]]] = {}
    for at in range(cluster.slices_of_experts):
        for expert in range(cluster.expert):
            shapes = _experts(weights, cluster, at, expert)
            experts[at, expert] = shapes, frozenset(shape.name for shape in shapes)
    found: list[tuple[Held, Held]] = []
    for shard in range(cluster.shards):
        for tensor in range(cluster.tensor):
            slice_number, expert, at = _expert_place(cluster, tensor + cluster.tensor * shard)
            of_dense = Held(*dense[tensor], shard, cluster.shards)
            of_experts = Held(*experts[slice_number, expert], at, cluster.shards_of_experts)
            found.append((of_dense, of_experts))
    return found


def _expert_place(cluster: Cluster, number: int) -> tuple[int, int, int]:
    """Return a stage's rank among the slices of experts, experts, and those that hold the same."""
    slices = cluster.slices_of_experts
    if cluster.has_data_before_experts:
        expert, at = divmod(number, cluster.shards_of_experts)
        return 0, expert, at
    return number % slices, number // slices % cluster.expert, number // (slices * cluster.expert)


def _experts(
    weights: Sequence[Weight], cluster: Cluster, at: int, expert: int
) -> list[ParameterShape]:
    """Return a rank's experts: of DeepSpeed by their number in the layer."""
    own = [weight for weight in weights if weight.is_expert]
    if cluster.zero_stage is None:
        slices = cluster.slices_of_experts
        return [weight.on((at, slices), (expert, cluster.expert)) for weight in own]
    count = max((number_of(weight.name) + 1 for weight in own), default=0)
    held = count // cluster.expert
    return [w.on((0, 1)) for w in own if number_of(w.name) // max(held, 1) == expert]


def pieces_by_rank(
    model: GPT,
    cluster: Cluster,
    stage: Stage,
    assignment: Sequence[Sequence[str]],
    held: Sequence[tuple[Held, Held]],
) -> list[Pieces]:
    """Return the masters that each rank of the stage serves, by name: shape, and where it begins.

    `assignment` are the names of its fragments.
    """
    found: list[Pieces] = []
    # ranks that hold alike have the same rows
    known: dict[tuple[int, bool], tuple[list[_Row], dict[str, tuple[int, ...]]]] = {}
    for own in held:
        pieces: dict[str, tuple[tuple[int, ...], int]] = {}
        for runs, is_expert in zip(own, (False, True), strict=True):
            key = (id(runs.shapes), is_expert)
            if key not in known:
                rows = list(_rows(model, cluster, stage, assignment, runs, is_expert))
                known[key] = rows, {shape.name: shape.shape for shape in runs.shapes}
            rows, wholes = known[key]
            for row in rows:
                _cut(pieces, row, wholes, runs)
        found.append(pieces)
    return found


def _rows(
    model: GPT,
    cluster: Cluster,
    stage: Stage,
    assignment: Sequence[Sequence[str]],
    held: Held,
    is_expert: bool,
) -> Iterator[_Row]:
    if cluster.zero_stage is None and cluster.is_sharded:
        yield from _buffers(model, cluster, stage, held, is_expert)
    elif cluster.zero_stage == 3:
        for shape in held.shapes:
            yield _row([shape])
    elif cluster.zero_stage in (1, 2):
        groups = in_groups(held.shapes) if is_expert else [held.shapes]
        for group in groups:
            yield _row(group)
    else:
        by_name = {shape.name: shape for shape in held.shapes if shape.name in held.served}
        for names in assignment:
            yield _row([by_name[name] for name in names if name in by_name])


def _row(shapes: Sequence[ParameterShape]) -> _Row:
    ends = list(accumulate(shape.numel for shape in shapes))
    begins = zip((shape.name for shape in shapes), [0, *ends], strict=False)
    return _Row(list(begins), ends[-1] if ends else 0)


def _buffers(
    model: GPT, cluster: Cluster, stage: Stage, held: Held, is_expert: bool
) -> Iterator[_Row]:
    """Yield the buckets of a rank's model chunks, cut over the ranks that hold them."""
    chunk_of = {
        layer: number
        for number, layers in enumerate(cluster.layers(model)[stage.index])
        for layer in layers
    }
    last = cluster.split.chunks - 1
    chunks: list[list[ParameterShape]] = [[] for _ in range(cluster.split.chunks)]
    for shape in held.shapes:
        layer = _LAYER.match(shape.name)
        is_first = shape.name.startswith("embedding.")
        chunks[chunk_of[int(layer[1])] if layer else 0 if is_first else last].append(shape)
    is_tied = model.is_tied and stage.count > 1
    if is_tied and stage.index == stage.count - 1 and not is_expert:
        copy = (model.vocabulary // cluster.tensor, model.hidden)
        chunks[last].append(ParameterShape(_COPY, copy))
    for chunk in chunks:
        begins: list[tuple[str, int]] = []
        end = 0
        for shape in reversed(chunk):
            is_apart = is_tied and shape.name.startswith((_COPY, "embedding.word_embeddings"))
            if is_apart and begins:
                yield _bucket(begins, end, held.ranks)
                begins, end = [], 0
            end = -(-end // _PARAMETER_AT) * _PARAMETER_AT
            begins.append((shape.name, end))
            end += shape.numel
            if is_apart:
                yield _bucket(begins, end, held.ranks)
                begins, end = [], 0
        if begins:
            yield _bucket(begins, end, held.ranks)


def _bucket(begins: Sequence[tuple[str, int]], end: int, ranks: int) -> _Row:
    multiple = lcm(ranks, _BUCKET_OF)
    return _Row(begins, -(-end // multiple) * multiple)


def _cut(
    pieces: dict[str, tuple[tuple[int, ...], int]],
    row: _Row,
    wholes: Mapping[str, tuple[int, ...]],
    held: Held,
) -> None:
    """Add this rank's run of a row to `pieces`, in place, what others serve left out."""
    run = -(-row.end // held.ranks)
    first, last = held.rank * run, (held.rank + 1) * run
    for name, place in row.begins:
        numel = ParameterShape("", wholes.get(name, ())).numel
        start, stop = max(first - place, 0), min(last - place, numel)
        if stop > start and name in held.served:
            is_whole = stop - start == numel
            pieces[name] = (wholes[name] if is_whole else (stop - start,), start)
