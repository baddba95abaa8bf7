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
from dsx.method.method import Method
from dsx.outer.matrix_owners import wanted_whole
from dsx.outer.memory import OuterMemory, StatePlace, predict
from dsx.outer.passing_on import lent_bytes
from dsx.outer.whole_matrices import MatrixGather, buffer_bytes, plan_gathers, wires_of
from dsx.plan.gpt_shapes import GPT
from dsx.plan.inner_memory import InnerMemory
from dsx.plan.memory.pieces import Held, held_by_rank, pieces_by_rank
from dsx.plan.model_files import Batch, Cluster
from dsx.plan.stage_weights import held_on_rank, inner_of, stage_shapes

_SHARE_CHUNK = 1 << 24  # of engines/replicated.py


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes; `on_device` and `on_host` are sums of inner and outer by placement.

    `lent` are bytes of host memory more, for a while, as passing_on.py says.
    """

    stage: Stage
    numel: int
    inner: InnerMemory
    outer: OuterMemory
    contributions: int
    place: StatePlace
    lent: int = 0

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
    held = held_by_rank(model, cluster, stage)
    layouts = [
        lay_out(assignment, pieces, wholes, stage.index)
        for pieces in pieces_by_rank(model, cluster, stage, assignment, held)
    ]
    num_tensors = [len(names) for names in assignment]
    wires = layouts
    if method.compression.needs_whole_matrices:
        wires = wires_of(layouts, wanted_whole(method))
    of_ranks = [num_tensors] * len(layouts)
    rank = largest_rank(method, config.clusters.num_clusters, layouts, wires, of_ranks)
    matrix_gathers = _matrix_gathers(config, layouts, rank)
    in_cluster = buffer_bytes(matrix_gathers)
    if not cluster.shares_optimizer:
        in_cluster += sum(_gathered(own, assignment, wholes) for own in held[rank])
    wire = [gather.wire for gather in matrix_gathers]
    places = has_accelerators and place == "masters", place == "disk"
    outer = predict(
        method, layouts[rank], num_tensors, wire, config.clusters.num_clusters, in_cluster,
        *places, has_accelerators and config.coding.makes_factors_there(place == "masters"),
    )  # fmt: skip
    launched = launched_together(config, layouts[rank])
    return RankMemory(
        stage=stage,
        numel=sum(held_on_rank(model, cluster, stage)),
        inner=inner_of(model, cluster, stage, batch),
        outer=outer,
        contributions=4 * launched if place == "masters" else 0,
        place=place,
        lent=lent_bytes(method, wire, *places),
    )


def _gathered(
    held: Held, assignment: Sequence[Sequence[str]], wholes: Mapping[str, tuple[int, ...]]
) -> int:
    """Return the bytes in which ranks that hold the same gather it, as engines/replicated.py."""
    most = max(sum(_numel(wholes[n]) for n in names if n in held.served) for names in assignment)
    if held.ranks == 1 or not most:
        return 0
    return 4 * min(-(-most // held.ranks), _SHARE_CHUNK // held.ranks) * (held.ranks + 1)


def _matrix_gathers(
    config: DsxConfig, layouts: Sequence[Sequence[Fragment]], rank: int
) -> list[MatrixGather]:
    if not config.method.compression.needs_whole_matrices:
        layouts, rank = [layouts[rank]], 0
    return plan_gathers(layouts, rank, wanted_whole(config.method), None)


def largest_rank(
    method: Method,
    num_clusters: int,
    layouts: Sequence[Sequence[Fragment]],
    wires: Sequence[Sequence[Fragment]],
    num_tensors: Sequence[Sequence[int]],
) -> int:
    """Return the rank of a stage whose outer state is largest; all are given by rank."""
    totals: dict[object, int] = {}  # of ranks that have and send tensors of the same shapes

    def outer_state(rank: int) -> int:
        own, wire = layouts[rank], wires[rank]
        kind = tuple(tuple((s.shape, s.whole) for s in f.layout) for f in (*own, *wire))
        kind = kind, tuple(num_tensors[rank])
        if kind not in totals:
            totals[kind] = predict(method, own, num_tensors[rank], wire, num_clusters).total
        return totals[kind]

    return max(range(len(layouts)), key=outer_state)


def launched_together(config: DsxConfig, fragments: Sequence[Fragment]) -> int:
    """Return the elements whose copies to the host may be under way at one step."""
    sizes = [fragment.numel for fragment in fragments]
    is_staggered = config.axes["schedule"]["type"] == "streaming"
    return max(sizes, default=0) if is_staggered else sum(sizes)


def _numel(shape: tuple[int, ...]) -> int:
    return ParameterShape("", shape).numel
