"""Memory per rank of a run that is only planned: the inner engine's, and outer training's.

From a model's sizes, how a cluster is cut, and a method. The outer part is `memory.predict`, over
fragments laid out as in the run; the inner part is inner_memory.py. What lies on the accelerator
and what on the host and on disk is told apart, because that can be chosen (`state.device`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsx.config.schema import DsxConfig
from dsx.core.types import Fragment, ParameterShape, Stage
from dsx.method.fragments import assign_stage, lay_out
from dsx.outer.memory import OuterMemory, StatePlace, predict
from dsx.outer.whole_matrices import MatrixGather, plan_gathers, share_out
from dsx.plan.gpt_shapes import GPT
from dsx.plan.inner_memory import InnerMemory
from dsx.plan.model_files import Batch, Cluster, inner_of, stage_shapes

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
    model: GPT, cluster: Cluster, stage: Stage, config: DsxConfig, batch: Batch
) -> RankMemory:
    """Return the memory of a stage's largest rank; ValueError for a model that cannot be cut so."""
    method = config.method
    shapes, own_by_tensor_rank = stage_shapes(model, cluster, stage)
    assignment = assign_stage(method.fragments, shapes, stage)
    wholes = {p.name: p.shape for p in shapes}
    layouts = [
        lay_out(assignment, pieces, wholes, stage.index)
        for pieces in _pieces_by_rank(cluster, assignment, wholes, own_by_tensor_rank)
    ]
    rank = _largest(config, layouts)
    matrix_gathers = _matrix_gathers(config, layouts, rank)
    in_cluster = sum(gather.buffer_bytes for gather in matrix_gathers)
    if not _is_sharded(cluster) and cluster.data > 1:
        run = max(sum(_numel(wholes[n]) for n in names) for names in assignment)
        chunk = max(1, min(-(-run // cluster.data), _SHARE_CHUNK // cluster.data))
        in_cluster += 4 * chunk * (cluster.data + 1)
    outer = predict(
        method,
        layouts[rank],
        [len(names) for names in assignment],
        [gather.wire for gather in matrix_gathers],
        config.clusters.num_clusters,
        in_cluster,
    )
    held = max(sum(p.numel for p in own) for own in own_by_tensor_rank)
    if model.is_tied and 0 < stage.index == stage.count - 1:  # a copy, which is not synchronised
        held += model.vocabulary * model.hidden // cluster.tensor
    place = config.state.device
    launched = launched_together(config, layouts[rank])
    return RankMemory(
        stage=stage,
        numel=held,
        inner=inner_of(model, cluster, stage, held, batch),
        outer=outer,
        contributions=4 * launched if place == "masters" else 0,
        place=place,
    )


def _is_sharded(cluster: Cluster) -> bool:
    return cluster.is_sharded if cluster.zero_stage is None else cluster.zero_stage > 0


def _pieces_by_rank(
    cluster: Cluster,
    assignment: Sequence[Sequence[str]],
    wholes: Mapping[str, tuple[int, ...]],
    own_by_tensor_rank: Sequence[Sequence[ParameterShape]],
) -> list[Pieces]:
    """Return the masters that each rank of the stage serves.

    Equal parts of each parameter (ZeRO-3), equal runs of all of them in the model's order, whatever
    the fragments (ZeRO-1 and 2), or equal runs of every fragment.
    """
    found: list[Pieces] = []
    served: set[str] = set()
    for own in own_by_tensor_rank:
        names = {p.name for p in own} - served  # what tensor ranks hold alike is the first one's
        served |= names
        for rank in range(cluster.data):
            pieces: dict[str, tuple[tuple[int, ...], int]] = {}
            rows = [list(wholes)] if cluster.zero_stage in (1, 2) else assignment
            for fragment in rows:
                mine = [n for n in fragment if n in names]
                if cluster.zero_stage == 3:
                    for name in mine:
                        _cut(pieces, [name], wholes, rank, cluster.data)
                else:
                    _cut(pieces, mine, wholes, rank, cluster.data)
            found.append(pieces)
    return found


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
