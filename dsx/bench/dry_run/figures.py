"""What the ranks of a built stage send, hold and open, by the code that a run does it with.

Layouts are those of the ranks' adapters. What travels is shared out as in a run, what is sent is
what the compressor declares for it, and outer state is allocated by `StateStore`, on fakes. Only
buffers that a run makes at its first transfer are by `outer/memory.py`'s account, which the
allocator's is held to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from dsx.bench.dry_run.built_rank import BuiltRank
from dsx.bench.dry_run.stand_in import no_memory
from dsx.compress.wire.compiled import unavailable
from dsx.config.schema import DsxConfig
from dsx.core.membership import Seat
from dsx.core.types import Fragment, Stage
from dsx.outer.guard import sample_of
from dsx.outer.matrix_owners import wanted_whole
from dsx.outer.memory import OuterMemory, predict
from dsx.outer.passing_on import lent_bytes
from dsx.outer.state import StateStore
from dsx.outer.whole_matrices import buffer_bytes, fragments_sent, plan_gathers, wires_of
from dsx.plan.memory.plan import largest_rank, launched_together
from dsx.plan.traffic import Load, Share, Traffic

_AT_THE_START = ("anchor", "outer_optimizer", "delay", "staleness", "transfers")  # allocated then


@dataclass(frozen=True)
class RankFigures:
    """One rank: `wire` are its fragments as they travel, `used` those that it has to do with.

    `bytes_sent` are those of every fragment once, by cluster.
    """

    built: BuiltRank
    wire: Sequence[Fragment]
    used: Sequence[int]
    bytes_sent: Sequence[int]

    @property
    def most_sent(self) -> int:
        """What it sends in the cluster where it sends most."""
        return max(self.bytes_sent)

    def connections(self, num_clusters: int, streams: int) -> int:
        """Return how many it holds to its peers over gloo: of its fragments, and to meet."""
        return (1 + len(self.used) * streams) * (num_clusters - 1)

    @property
    def threads(self) -> int:
        """Threads for transfers: one of every fragment, and one to meet."""
        return 1 + len(self.used)


@dataclass(frozen=True)
class StageFigures:
    """The ranks of a stage, and what the one with the most outer state holds and saves."""

    stage: Stage
    ranks: Sequence[RankFigures]
    largest: int
    memory: OuterMemory
    on_host: int
    on_device: int
    on_disk: int
    saved: int
    lent: int = 0  # on the host more, for a while (outer/passing_on.py)

    @property
    def lanes(self) -> int:
        """How many of the ranks send anything: each to its like in every other cluster."""
        return sum(bool(rank.used) for rank in self.ranks)

    @property
    def spread(self) -> float:
        """The most that a rank sends in any cluster, by the mean of all ranks and clusters."""
        sent = [size for rank in self.ranks for size in rank.bytes_sent]
        return max(sent) * len(sent) / sum(sent) if sum(sent) else 1.0

    @property
    def bytes_sent(self) -> list[int]:
        """What all ranks together send of every fragment once, by cluster."""
        return [sum(sizes) for sizes in zip(*(rank.bytes_sent for rank in self.ranks), strict=True)]

    def at(self, stage: Stage) -> StageFigures:
        """Return the same figures for a stage that is built alike."""

        def moved(fragments: Sequence[Fragment]) -> list[Fragment]:
            return [replace(fragment, stage=stage.index) for fragment in fragments]

        ranks = [replace(rank, wire=moved(rank.wire)) for rank in self.ranks]
        return replace(self, stage=stage, ranks=ranks)


def figures_of(
    built: Sequence[BuiltRank], config: DsxConfig, has_accelerators: bool = True
) -> StageFigures:
    """Return the figures of a stage all of whose ranks have been built.

    `has_accelerators`: outer steps are taken there, where the state is, with more hashed at a time.
    """
    method, clusters = config.method, config.clusters.num_clusters
    layouts = [rank.fragments for rank in built]
    wires = [list(layout) for layout in layouts]
    if method.compression.needs_whole_matrices:
        wires = wires_of(layouts, wanted_whole(method))
    sent = [_bytes_of(config, *pair) for pair in enumerate(zip(built, wires, strict=True))]
    ranks = [
        RankFigures(rank, wire, fragments_sent(rank.fragments, wire), bytes_sent)
        for rank, wire, bytes_sent in zip(built, wires, sent, strict=True)
    ]
    num_tensors = [rank.num_tensors for rank in built]
    largest = largest_rank(method, clusters, layouts, wires, num_tensors)
    place = config.state.device
    is_there = has_accelerators and place == "masters"
    where = is_there, has_accelerators and config.coding.makes_factors_there(is_there)
    memory, saved = _held(config, layouts, ranks[largest], largest, where)
    lent = lent_bytes(method, ranks[largest].wire, is_there, place == "disk")
    launched = 4 * launched_together(config, built[largest].fragments)
    on_device = memory.on_device(place) + (launched if place == "masters" else 0)
    return StageFigures(
        built[0].stage, ranks, largest, memory, memory.on_host(place), on_device,
        memory.on_disk(place), saved, lent,
    )  # fmt: skip


def _bytes_of(
    config: DsxConfig, shard: int, pair: tuple[BuiltRank, Sequence[Fragment]]
) -> list[int]:
    """Return what a rank sends of every fragment once, by cluster, in the long run."""
    rank, wire = pair
    used = set(fragments_sent(rank.fragments, wire))
    loads = [
        Load(fragment.stage, fragment.id, count, (Share(fragment, (shard,)),))
        for fragment, count in zip(wire, rank.num_tensors, strict=True)
        if fragment.id in used
    ]
    if not loads:
        return [0] * config.clusters.num_clusters
    traffic = Traffic(config.method, loads, config.clusters.num_clusters)
    return traffic.bytes_sent.sum(axis=0).tolist()


def _held(
    config: DsxConfig,
    layouts: Sequence[Sequence[Fragment]],
    rank: RankFigures,
    shard: int,
    is_on_accelerator: tuple[bool, bool],
) -> tuple[OuterMemory, int]:
    """Return what a rank's outer state takes, and the bytes that it saves, none under way.

    `is_on_accelerator`: whether outer steps are taken there, and factors are made there.
    """
    method, clusters = config.method, config.clusters.num_clusters
    own, is_whole = rank.built, method.compression.needs_whole_matrices
    together, place = (layouts, shard) if is_whole else ([own.fragments], 0)
    gathers = plan_gathers(together, place, wanted_whole(method), None)
    in_cluster = own.buffer_bytes + buffer_bytes(gathers)
    said = predict(
        method, own.fragments, own.num_tensors, rank.wire, clusters, in_cluster,
        is_on_accelerator[0], config.state.device == "disk", is_on_accelerator[1],
    )  # fmt: skip
    adapter: Any = SimpleNamespace(
        fragments=own.fragments, device=torch.device("cpu"), pins_host_memory=False
    )
    unavailable("cpu")  # asked once: a codec that asks inside would compile for fakes, and run
    with no_memory():
        seat = Seat.of(0, clusters, shard)
        state = StateStore(method, adapter, own.num_tensors, rank.wire, seat)
        given = state.allocator.given
        kept: list[torch.Tensor] = []
        for fragment in own.fragments:
            kept += state.named_state(fragment.id).values()
            if method.guards:
                kept.append(sample_of(torch.empty(fragment.numel)))
    masters = 4 * sum(fragment.numel for fragment in own.fragments)
    saved = sum(tensor.nbytes for tensor in kept) + (
        masters if method.delay.export == "mean" else 0
    )
    return replace(said, **{name: given.get(name, 0) for name in _AT_THE_START}), saved
