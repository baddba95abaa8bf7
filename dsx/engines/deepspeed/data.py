"""`training_data` of `dsx.initialize`: each cluster's part of it, and the position in a checkpoint.

DeepSpeed (0.19) cuts a dataset over the ranks of its world, which is one cluster's: every cluster
would read the same samples. So it is given this cluster's part only, of data that all share; data
of a cluster's own is read whole, and `clusters.data` or a look at the samples says which it is. It
also begins the dataset
anew after every resume; the loader here goes on with the next sample.

The position is counted in samples of the cluster, in the order that all its ranks share, so that
it serves another number of ranks and another micro-batch, too (a few samples are read twice where
their number is not divisible). Of a pipeline, the first and the last stage read and count.

What a cluster that is gone has not read is dealt to the others (dsx/data/deal.py). They read it
before they go on, in its order; the loader is begun anew for that.

A run that begins from a checkpoint of plain DeepSpeed (synchronous.py) first reads the rest of that
run's epoch: of what its order has left, cluster m takes every C-th sample from the m-th on.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from dsx.comm.world import World
from dsx.data.cluster_batches import ClusterShard
from dsx.data.deal import Stretch
from dsx.data.identity import build_of
from dsx.data.reading import Others
from dsx.data.windows import TokenWindows
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.deepspeed.loader import ResumableLoader
from dsx.training.data_sources import Source, share_data
from dsx.training.handle import Handle

logger = logging.getLogger(__name__)


def share_training_data(data: Any, world: World, wanted: str) -> ClusterShard:
    """Return what this cluster reads of `training_data`, and say so. Collective over all clusters.

    Its part of what all clusters share, or all of what is its own, as `wanted` says or the data.
    """
    from deepspeed.utils import log_dist

    source = source_of(data)
    is_split = share_data(world.rendezvous, wanted, [source])
    shard = cut_training_data(
        data, *((world.cluster_id, world.num_clusters) if is_split else (0, 1))
    )
    whose = "shared by all clusters" if is_split else "of this cluster's own"
    log_dist(
        f"dsx: training_data ({source.name}) is {whose}: cluster {world.cluster_id} reads "
        f"{len(shard):,} of {len(data):,} samples", ranks=[0],
    )  # fmt: skip
    return shard


def source_of(data: Any) -> Source:
    """Return a dataset's identity: its length, and three samples where they can be read again."""
    _require_length(data)
    count = len(data)
    name = f"{type(data).__name__} of {count:,} samples"
    places = sorted({0, count // 2, count - 1}) if count else []
    state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        first, again = ([data[i] for i in places] for _ in range(2))
    random.setstate(state[0])
    np.random.set_state(state[1])
    digest = _digest(first)
    build = build_of(data.prefix) if isinstance(data, TokenWindows) else None
    return Source(name, digest if digest == _digest(again) else None, build=build)


def _digest(value: Any) -> str | None:
    """Return the digest of tensors, arrays and plain values, nested or not; None for others."""
    hasher = blake2b(digest_size=16)
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        if isinstance(leaf, (np.ndarray, np.generic)):
            if leaf.dtype.hasobject:  # its bytes are addresses
                return None
            hasher.update(np.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, (str, bytes, bool, int, float, type(None))):
            hasher.update(repr(leaf).encode())
        else:
            return None
    return hasher.hexdigest()


def cut_training_data(data: Any, cluster_id: int, num_clusters: int) -> ClusterShard:
    """Return a cluster's part of a dataset; ValueError for one that cannot be cut."""
    _require_length(data)
    return ClusterShard(data, cluster_id, num_clusters)


def _require_length(data: Any) -> None:
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise ValueError(
            f"training_data={type(data).__name__} has no length, so that dsx cannot cut it and all "
            "clusters would read the same samples; give a dataset with __len__ and __getitem__, or "
            "leave training_data out and read every num_clusters-th sample from the "
            "cluster_id-th on, as engine.dsx knows them, in a loader of your own"
        )


def loader_of(engine: Any) -> ResumableLoader | None:
    """Return the loader of `training_data` that this rank reads, if it keeps its position."""
    held = engine.training_dataloader
    held = getattr(held, "loader", held) if engine.pipeline_parallelism else held
    return held if isinstance(held, ResumableLoader) else None


def readers_of(engine: Any) -> int:
    """Return over how many ranks DeepSpeed deals samples; peers in a sequence read the same."""
    mpu = engine.mpu
    return int(engine.dp_world_size if mpu is None else mpu.get_data_parallel_world_size())


class DataPosition:
    """Where a cluster is in its part of the training data: what a checkpoint carries."""

    def __init__(
        self, loader: ResumableLoader | None, shard: ClusterShard, trained: Callable[[], int]
    ) -> None:
        """`loader` is None on a rank that reads nothing; `trained` says how many samples this
        cluster would have trained on by now, had it been there from the beginning.
        """
        self._loader, self._trained = loader, trained
        self._shard = shard
        self._identity = {
            "cluster_id": shard.cluster_id,
            "num_clusters": shard.num_clusters,
            "num_samples": len(shard.dataset),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on all ranks. Collective in the cluster."""
        loader = self._loader
        told = gather_objects(
            (loader.epoch, loader.consumed, loader.after, loader.others.state_dict())
            if loader else (0, 0, None, {})
        )  # fmt: skip
        epoch, consumed = max((epoch, consumed) for epoch, consumed, _, _ in told)
        state: dict[str, Any] = {"consumed": consumed, **self._identity}
        after = next((after for _, _, after, _ in told if after is not None), None)
        others = next((others for *_, others in told if others), None)
        more = {"epoch": epoch or None, "after": after, "others": others}
        return {**state, **{name: value for name, value in more.items() if value is not None}}

    @property
    def samples_per_epoch(self) -> int | None:
        """The samples of each cluster; None for data of this cluster's own."""
        return len(self._shard) if self._shard.num_clusters > 1 else None

    def place(self) -> tuple[int, int]:
        """Return the samples read of the own sequence, and those of what others have left."""
        loader, length = self._loader, len(self._shard)
        if loader is None:
            return 0, 0
        return loader.epoch * length + min(loader.consumed, length), loader.others.read

    def left(self) -> list[Stretch]:
        """Return what is still to be read of others'."""
        return [] if self._loader is None else self._loader.others.left()

    def require_same_data(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless a saved position is in this dataset."""
        self._require_same(state, ("num_samples",))

    def begin_at(self, place: int, read: int, left: Sequence[Stretch]) -> None:
        """Go to a place in the own sequence, behind `left` of others', of which some is read."""
        if self._loader is not None:
            self._loader.epoch, consumed = divmod(place, len(self._shard))
            self._loader.others = Others(read, left)
            self._loader.go_to(consumed)

    def take_over(self, stretches: Sequence[Stretch]) -> None:
        """Read what others have left before going on."""
        if self._loader is not None:
            self._loader.take_over(stretches)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the next sample; ValueError for a position in other data."""
        self._require_same(state_dict, self._identity)
        if self._loader is not None:
            self._loader.epoch = state_dict.get("epoch", 0)
            self._loader.others = Others.of_state(state_dict.get("others"))
            self._loader.go_to(state_dict["consumed"], state_dict.get("after"))

    def place_here(self) -> dict[str, Any]:
        """Return what this rank has read, of all ranks' samples."""
        if self._loader is None:
            return {}
        read = {"consumed": self._loader.consumed, "after": self._loader.after}
        return {**read, "num_samples": self._identity["num_samples"]}

    def go_where_others_are(self, place: dict[str, Any]) -> None:
        """Go on in this cluster's part where another cluster is in its own.

        Of data of its own that have another number of samples, where it would be by itself.
        """
        if self._loader is None:
            return
        if place["num_samples"] == self._identity["num_samples"]:
            self._loader.go_to(place["consumed"], place["after"])
            return
        self._loader.go_to(self._trained() % self._loader.num_samples)
        logger.warning(
            "training_data has %d samples here and %d in another cluster: it goes on where it "
            "would be after %d samples", self._identity["num_samples"], place["num_samples"],
            self._trained(),
        )  # fmt: skip

    def _require_same(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        for name, ours in self._identity.items():
            if name in names and state[name] != ours:
                raise ValueError(
                    f"the position in training_data was saved with {name}={state[name]}, "
                    f"and this run has {name}={ours}; resume with the same dataset"
                )


def follow_training_data(engine: Any, shard: ClusterShard, handle: Handle) -> DataPosition | None:
    """Let an engine's loader keep its position; None where DeepSpeed itself does (curricula)."""
    held = engine.training_dataloader

    def trained() -> int:
        return handle.step * engine.train_batch_size()

    def settle_if_due() -> None:
        if handle.joining.is_due:
            handle.settle()

    if not engine.pipeline_parallelism:
        if held.curriculum_learning_enabled:
            return None
        engine.training_dataloader = loader = ResumableLoader(held, readers_of(engine))
        loader.before_reading = settle_if_due  # no batch is of a place before
        return DataPosition(loader, shard, trained)
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return DataPosition(None, shard, trained)
    loader = held.loader = ResumableLoader(held.loader, readers_of(engine))
    held.data_iter = iter(loader)
    return DataPosition(loader, shard, trained)
