"""The model of a plan, cut as a run would cut it: stages, fragments, and each rank's share.

From files, or from a number of parameters and layers. A rank's share is taken to be one part in n
of every parameter; whole matrices, where a codec needs them, are dealt out, the largest first. A
run's shares differ by alignment, a few bytes. Ranks whose shares have the same sizes are kept once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import count

from dsx.compress.base import Compressor
from dsx.core.types import Fragment, ParameterShape, Slot, Stage
from dsx.method.fragments import Fragmenter, assign_stage, group_by_layer, in_a_row
from dsx.plan.model_files import ModelFiles
from dsx.plan.published.scenario import require_number
from dsx.plan.stage_weights import inner_of, stage_shapes
from dsx.plan.traffic import Load, Share, of_sizes

MOST_PARAMETERS = 10**15  # more would not be counted in 64 bits, sent among thousands


@dataclass(frozen=True)
class PlannedModel:
    """Parameters by pipeline stage, in model order, and how many ranks share a stage's masters.

    `hidden` is the width of its matrices, None where these are not known; `files` what it was read
    from, if it was.
    """

    stages: tuple[tuple[ParameterShape, ...], ...]
    ranks_per_stage: int
    hidden: int | None
    files: ModelFiles | None = None

    @cached_property
    def numel(self) -> int:
        """All parameters."""
        return sum(p.numel for stage in self.stages for p in stage)

    @property
    def ranks(self) -> int:
        """Of one cluster."""
        return self.ranks_per_stage * len(self.stages)

    @cached_property
    def layers_per_stage(self) -> int:
        """Layers of the stage with fewest."""
        return min(len(group_by_layer(stage)) for stage in self.stages)

    @cached_property
    def inner_bytes(self) -> int | None:
        """What the inner engine takes of an accelerator, where it takes most; None if not known."""
        if self.files is None:
            return None
        model, cluster, batch = self.files.model, self.files.cluster, self.files.batch
        stages = [Stage(index, cluster.pipeline) for index in range(cluster.pipeline)]
        return max(inner_of(model, cluster, stage, batch).total for stage in stages)

    @property
    def active_numel(self) -> int:
        """The parameters that a token goes through, where experts are known; else all."""
        return self.numel if self.files is None else self.files.model.active_numel

    def loads(self, fragmenter: Fragmenter, compression: Compressor) -> list[Load]:
        """Return every fragment of every stage, as its ranks send it."""
        found: list[Load] = []
        is_wanted = compression.needs_whole_matrices and self.ranks_per_stage > 1
        for index, shapes in enumerate(self.stages):
            assigned = assign_stage(fragmenter, shapes, Stage(index, len(self.stages)))
            fragments = [[self._slots[index][name] for name in names] for names in assigned]
            taken = [[s for s in f if is_wanted and compression.takes(s)] for f in fragments]
            dealt = _dealt(taken, self.ranks_per_stage)
            for id, (slots, own) in enumerate(zip(fragments, dealt, strict=True)):
                alike = [((0,), 1, sorted(slots, key=lambda slot: slot.is_small))]
                if is_wanted or not compression.needs_whole_matrices:
                    alike = _shares(slots, own, self.ranks_per_stage)
                shares = [
                    Share(Fragment(id, index, in_a_row(sent)), numbers, ranks)
                    for numbers, ranks, sent in alike
                ]
                found.append(Load(index, id, len(slots), tuple(shares)))
        return found

    @cached_property
    def _slots(self) -> list[dict[str, Slot]]:
        """Whole parameters by name, of each stage."""
        return [{p.name: Slot(p.name, p.shape, 0, whole=p.shape) for p in s} for s in self.stages]

    def fullest_rank(self, loads: Sequence[Load]) -> tuple[list[Fragment], list[Fragment]]:
        """Return the fragments of the rank with most, as they lie and as they travel."""
        by_stage: dict[int, list[Load]] = {}
        for load in loads:
            by_stage.setdefault(load.stage, []).append(load)
        own = max(by_stage.values(), key=lambda loads: sum(load.numel for load in loads))
        held = [-(-load.numel // self.ranks_per_stage) for load in own]
        (lying,) = of_sizes(held)
        beyond: dict[int, int] = {}  # what ranks have that others have not
        for load in own:
            usual = sum(s.fragment.numel for s in load.shares if s.ranks > 1)
            for share in load.shares:
                for rank in share.shards if share.ranks == 1 else ():
                    beyond[rank] = beyond.get(rank, 0) + share.fragment.numel - usual
        fullest = max(sorted(beyond), key=beyond.__getitem__) if beyond else 0
        return lying, [_share_of(fullest, load).fragment for load in own]


def from_files(files: ModelFiles) -> PlannedModel:
    """Return what a file of flags, or a JSON with one, describes."""
    model, cluster = files.model, files.cluster
    stages = [
        tuple(stage_shapes(model, cluster, Stage(index, cluster.pipeline)))
        for index in range(cluster.pipeline)
    ]
    numel = sum(p.numel for stage in stages for p in stage)
    require_number("the model's parameters", numel, 1, MOST_PARAMETERS)
    return PlannedModel(tuple(stages), cluster.ranks_per_stage, model.hidden, files)


def from_sizes(params: float, layers: int, hidden: int | None, ranks: int) -> PlannedModel:
    """Return a model of equal layers: four square matrices of attention, and a wide and a long one.

    Without `hidden` each layer is one matrix of which only the size is known.
    """
    require_number("params", params, 1, MOST_PARAMETERS)
    require_number("layers", layers, 1, 10_000)
    per_layer = round(params / layers)
    if per_layer < 1:
        raise ValueError(
            f"--layers={layers}: {params:g} parameters do not give each layer one; "
            f"try --layers={max(int(params), 1)}"
        )
    shapes: list[ParameterShape] = []
    for layer in range(layers):
        name = f"layers.{layer}."
        if hidden is None:
            shapes.append(ParameterShape(f"{name}weight", (1, per_layer)))
            continue
        wide = round((per_layer - 4 * hidden**2) / (2 * hidden))
        if wide < 1:
            fits = math.isqrt(per_layer // 12)
            raise ValueError(
                f"--hidden={hidden}: {params:g} parameters in {layers} layers are {per_layer} per "
                f"layer, less than four matrices of {hidden} x {hidden}; "
                + (f"try --hidden={fits}" if fits else "leave --hidden out, or give fewer --layers")
            )
        shapes += [
            ParameterShape(f"{name}attention.qkv", (3 * hidden, hidden)),
            ParameterShape(f"{name}attention.out", (hidden, hidden)),
            ParameterShape(f"{name}mlp.up", (wide, hidden)),
            ParameterShape(f"{name}mlp.down", (hidden, wide)),
        ]
    return PlannedModel((tuple(shapes),), ranks, hidden)


def from_parameters(parameters: Sequence[ParameterShape], ranks: int) -> PlannedModel:
    """Return the model of a run; its width is that of most matrices' smaller side."""
    sides = Counter(min(p.shape[0], p.numel // p.shape[0]) for p in parameters if len(p.shape) > 1)
    hidden = sides.most_common(1)[0][0] if sides else None
    return PlannedModel((tuple(parameters),), ranks, hidden)


def from_numels(numels: Sequence[Sequence[int]], ranks: int) -> PlannedModel:
    """Return a pipeline of which only the sizes of fragments are known, as a run's records tell.

    `numels` are by stage; `ranks` those of a cluster, of which each stage has as many.
    """
    if ranks % len(numels):
        raise ValueError(
            f"--gpus-per-cluster {ranks} must be a multiple of the run's {len(numels)} stages"
        )
    number = count()
    stages = tuple(
        tuple(ParameterShape(f"layers.{next(number)}.weight", (1, n)) for n in of_stage)
        for of_stage in numels
    )
    return PlannedModel(stages, ranks // len(numels), None)


def _share_of(rank: int, load: Load) -> Share:
    """Return a rank's share: one with its number, or the one that is many ranks'."""
    return next(s for s in load.shares if s.ranks > 1 or rank in s.shards)


def _dealt(taken: Sequence[Sequence[Slot]], ranks: int) -> list[dict[int, list[Slot]]]:
    """Return by fragment the matrices that each rank gets whole, of all that are `taken`.

    The largest of all fragments first, each to the rank with the least so far. Those of one size
    begin with another fragment than the ones before, so that a rank has little of each.
    """
    count = sum(map(len, taken))
    by_load = [(0, rank) for rank in range(min(ranks, count))]  # the others get none
    sizes = sorted({slot.numel for matrices in taken for slot in matrices}, reverse=True)
    turns = {numel: turn for turn, numel in enumerate(sizes)}
    dealt: list[dict[int, list[Slot]]] = [{} for _ in taken]
    every = [(slot, fragment) for fragment, slots in enumerate(taken) for slot in slots]
    for slot, fragment in sorted(
        every, key=lambda it: (-it[0].numel, (it[1] + turns[it[0].numel]) % len(taken))
    ):
        numel, rank = by_load[0]
        dealt[fragment].setdefault(rank, []).append(slot)
        heapreplace(by_load, (numel + slot.numel, rank))
    return dealt


def _shares(
    slots: Sequence[Slot], own: Mapping[int, Sequence[Slot]], ranks: int
) -> list[tuple[tuple[int, ...], int, list[Slot]]]:
    """Return what each of a stage's ranks sends of a fragment, as `Share` has it, equal ones once.

    `own` are the matrices that ranks have whole. What all ranks without one send comes last.
    """
    names = {slot.name for matrices in own.values() for slot in matrices}
    pieces = _pieces([slot for slot in slots if slot.name not in names], ranks)
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank in sorted(own):
        alike.setdefault(tuple(slot.shape for slot in own[rank]), []).append(rank)
    shares = [(tuple(of), 1, [*own[of[0]], *pieces]) for of in alike.values()]
    if len(own) < ranks:
        first = next(rank for rank in count() if rank not in own)
        shares.append(((first,), ranks - len(own), pieces))
    return shares


def _pieces(slots: Sequence[Slot], ranks: int) -> list[Slot]:
    """Return a rank's part of what is flat to its codec: of all large ones, of all small."""
    found: list[Slot] = []
    for name, own in (
        ("large", [slot for slot in slots if not slot.is_small]),
        ("small", [slot for slot in slots if slot.is_small]),
    ):
        if own:
            held = sum(-(-slot.numel // ranks) for slot in own)
            total = sum(slot.numel for slot in own)
            whole = (2, total) if name == "large" else (total,)  # never that of a whole matrix
            found.append(Slot(name, (held,), 0, whole=whole))
    return found
