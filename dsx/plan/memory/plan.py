"""Memory per rank of a run that is only planned: the inner engine's, and outer training's.

From a model's sizes, how a cluster is cut, and a method. The outer part is `memory.predict`, over
fragments laid out as in the run; the inner part is inner_memory.py. What lies on the accelerator
and what on the host and on disk is told apart, because that can be chosen (`state.device`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from dsx.config.schema import DsxConfig
from dsx.core.types import Fragment, ParameterShape, Stage
from dsx.method.fragments import assign_stage, lay_out
from dsx.outer.memory import OuterMemory, StatePlace, predict
from dsx.outer.whole_matrices import MatrixGather, plan_gathers, share_out
from dsx.plan.gpt_shapes import GPT
from dsx.plan.inner_memory import InnerMemory
from dsx.plan.model_files import (
    Batch,
    Cluster,
    copies_before,
    held_on_rank,
    inner_of,
    stage_shapes,
    stage_weights,
)

_SHARE_CHUNK = 1 << 24  # of engines/replicated.py
Pieces = Mapping[str, tuple[tuple[int, ...], int]]


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes; `on_device` and `on_host` are sums of inner and outer by placement."""

    stage: Stage
    numel: int
    inner: InnerMemory
    outer: OuterMemory
    contributions: int
    place: StatePlace

    @property
    def outer_on_device(self) -> int:
        """Bytes of outer training on the accelerator."""
        return self.outer.on_device(self.place) + self.contributions

    @property
    def outer_on_host(self) -> int:
        """Bytes of outer training in host memory."""
        return self.outer.on_host(self.place)

    @property
    def outer_on_disk(self) -> int:
        """Bytes of outer training in files."""
        return self.outer.on_disk(self.place)

    @property
    def copied_for_save(self) -> int:
        """Bytes of host memory more, at most, while a save is written beside training."""
        return self.outer.copied_for_save

    @property
    def on_device(self) -> int:
        """All bytes on the accelerator."""
        return self.inner.total + self.outer_on_device


def plan_stage(
    model: GPT,
    cluster: Cluster,
    stage: Stage,
    config: DsxConfig,
    batch: Batch,
    has_accelerators: bool = True,
) -> RankMemory:
    """Return the memory of a stage's largest rank; ValueError for a model that cannot be cut so.

    `has_accelerators`: outer steps are taken there, where the state is, with more hashed at a time.
    """
    method, place = config.method, config.state.device
    shapes = stage_shapes(model, cluster, stage)
    assignment = assign_stage(method.fragments, shapes, stage)
    wholes = {p.name: p.shape for p in shapes}
    held = _held_by_rank(model, cluster, stage)
    copies = copies_before(model, cluster, stage)
    layouts = [
        lay_out(assignment, pieces, wholes, stage.index)
        for pieces in _pieces_by_rank(cluster, assignment, wholes, held, copies)
    ]
    rank = _largest(config, layouts)
    matrix_gathers = _matrix_gathers(config, layouts, rank)
    in_cluster = sum(gather.buffer_bytes for gather in matrix_gathers)
    if not _is_sharded(cluster):
        in_cluster += sum(_gathered(runs, assignment, wholes) for runs in held[rank])
    outer = predict(
        method,
        layouts[rank],
        [len(names) for names in assignment],
        [gather.wire for gather in matrix_gathers],
        config.clusters.num_clusters,
        in_cluster,
        has_accelerators and place == "masters",
        place == "disk",
        factors_there(config, has_accelerators),
    )
    launched = launched_together(config, layouts[rank])
    return RankMemory(
        stage=stage,
        numel=sum(held_on_rank(model, cluster, stage)),
        inner=inner_of(model, cluster, stage, batch),
        outer=outer,
        contributions=4 * launched if place == "masters" else 0,
        place=place,
    )


def factors_there(config: DsxConfig, has_accelerators: bool) -> bool:
    """Return whether a run makes factors on an accelerator, as training/coding.py decides."""
    wanted = config.coding.factors
    is_there = config.state.device == "masters" if wanted is None else wanted == "accelerator"
    return has_accelerators and is_there


def _is_sharded(cluster: Cluster) -> bool:
    return cluster.is_sharded if cluster.zero_stage is None else cluster.zero_stage > 0


class _Run(NamedTuple):
    """What ranks hold alike of a stage, of which this one is the `rank`-th of `ranks`."""

    names: AbstractSet[str]
    rank: int
    ranks: int


def _held_by_rank(model: GPT, cluster: Cluster, stage: Stage) -> list[tuple[_Run, _Run]]:
    """Return the dense weights and the experts that each rank of the stage is to serve.

    What tensor ranks hold alike is the first one's.
    """
    weights = stage_weights(model, cluster, stage)
    slices = cluster.slices_of_experts
    dense = [
        {
            weight.on((tensor, cluster.tensor)).name
            for weight in weights
            if not weight.is_expert and (tensor == 0 or weight.split is not None)
        }
        for tensor in range(cluster.tensor)
    ]
    experts = {
        (at, expert): {
            weight.on((at, slices), (expert, cluster.expert)).name
            for weight in weights
            if weight.is_expert
        }
        for at in range(slices)
        for expert in range(cluster.expert)
    }
    found: list[tuple[_Run, _Run]] = []
    for tensor in range(cluster.tensor):
        for shard in range(cluster.shards):
            number = tensor + cluster.tensor * shard
            slice_number, expert = number % slices, number // slices % cluster.expert
            at = number // (slices * cluster.expert)
            found.append(
                (
                    _Run(dense[tensor], shard, cluster.shards),
                    _Run(experts[slice_number, expert], at, cluster.shards_of_experts),
                )
            )
    return found


def _pieces_by_rank(
    cluster: Cluster,
    assignment: Sequence[Sequence[str]],
    wholes: Mapping[str, tuple[int, ...]],
    held: Sequence[tuple[_Run, _Run]],
    copies: Sequence[ParameterShape],
) -> list[Pieces]:
    """Return the masters that each rank of the stage serves.

    Equal parts of each parameter (ZeRO-3), equal runs of all of them in the model's order, whatever
    the fragments (ZeRO-1 and 2), or equal runs of every fragment. `copies` of tied weights, which
    another stage serves, have their place in the second.
    """
    found: list[Pieces] = []
    is_flat = cluster.zero_stage in (1, 2)
    rows = [list(wholes)] if is_flat else assignment
    before = {shape.name: shape.shape for shape in copies} if is_flat else {}
    sizes = {**before, **wholes}
    for runs in held:
        pieces: dict[str, tuple[tuple[int, ...], int]] = {}
        for names, rank, ranks in runs:
            for fragment in rows:
                mine = [n for n in fragment if n in names]
                mine = [*before, *mine] if mine else []
                for row in [[n] for n in mine] if cluster.zero_stage == 3 else [mine]:
                    _cut(pieces, row, sizes, rank, ranks)
        found.append({name: piece for name, piece in pieces.items() if name not in before})
    return found


def _gathered(
    runs: _Run, assignment: Sequence[Sequence[str]], wholes: Mapping[str, tuple[int, ...]]
) -> int:
    """Return the bytes in which ranks that hold the same gather it, as engines/replicated.py."""
    most = max(sum(_numel(wholes[n]) for n in names if n in runs.names) for names in assignment)
    if runs.ranks == 1 or not most:
        return 0
    return 4 * min(-(-most // runs.ranks), _SHARE_CHUNK // runs.ranks) * (runs.ranks + 1)


def _cut(
    pieces: dict[str, tuple[tuple[int, ...], int]],
    names: Sequence[str],
    wholes: Mapping[str, tuple[int, ...]],
    rank: int,
    count: int,
) -> None:
    """Add the rank-th of `count` equal runs over parameters in a row to `pieces`, in place."""
    run = -(-sum(_numel(wholes[n]) for n in names) // count)
    first, last, place = rank * run, (rank + 1) * run, 0
    for name in names:
        numel = _numel(wholes[name])
        start, stop = max(first - place, 0), min(last - place, numel)
        if stop > start:
            is_whole = stop - start == numel
            pieces[name] = (wholes[name] if is_whole else (stop - start,), start)
        place += numel


def _matrix_gathers(
    config: DsxConfig, layouts: Sequence[Sequence[Fragment]], rank: int
) -> list[MatrixGather]:
    compression = config.method.compression
    if not compression.needs_whole_matrices:
        layouts, rank = [layouts[rank]], 0
    return plan_gathers(layouts, rank, compression.takes, None)


def _largest(config: DsxConfig, layouts: Sequence[Sequence[Fragment]]) -> int:
    """Return the rank with the most to send; of equal ones, with the largest fragment."""
    sizes = [[fragment.numel for fragment in fragments] for fragments in layouts]
    sent = [sum(own) for own in sizes]
    if config.method.compression.needs_whole_matrices:
        _, sent = share_out(layouts, config.method.compression.takes)
    return max(range(len(layouts)), key=lambda rank: (sent[rank], max(sizes[rank])))


def launched_together(config: DsxConfig, fragments: Sequence[Fragment]) -> int:
    """Return the elements whose copies to the host may be under way at one step."""
    sizes = [fragment.numel for fragment in fragments]
    is_staggered = config.axes["schedule"]["type"] == "streaming"
    return max(sizes, default=0) if is_staggered else sum(sizes)


def _numel(shape: tuple[int, ...]) -> int:
    return ParameterShape("", shape).numel
