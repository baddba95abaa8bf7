"""Which cluster and rank reads which window, with an exact position for the checkpoint.

Cluster m reads only its own windows (shards.py): clusters are disjoint for ever, whatever the seed
or the epoch. By default those are w with w % num_clusters == m. Each epoch visits the cluster's
windows in a new permutation, seeded from (seed, epoch, cluster_id) and equal on all ranks of the
cluster; the cluster is in the seed so that two clusters do not read neighbouring windows of the
text in the same step.

A round takes world_size * micro_batch_size windows in that order, rank r every world_size-th from
the r-th on. A window is read at most once per epoch by one rank; a tail that fills no whole round
is dropped for that epoch. The position (epoch, offset) is the same on all ranks of a cluster and
does not depend on the round, so a cluster may resume with another world_size or micro_batch_size:
it goes on with the very next window.

What a cluster that is gone has not read is dealt to the others (deal.py), which read it first, in
the order in which that cluster would have.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsx.data.deal import Stretch
from dsx.data.reading import Others
from dsx.data.shards import Shards, WindowDataset, windows_of

logger = logging.getLogger(__name__)


class OfWhole(int):
    """An index into the whole dataset of a `ClusterShard`, not into the cluster's part of it."""


class ClusterShard(Dataset[Tensor]):
    """The windows of one cluster as a dataset, for a DataLoader of your own.

    Hand it to `deepspeed.initialize(training_data=...)` or to a DataLoader with a sampler over the
    cluster's ranks; ClusterBatches does that part and keeps the position as well.
    """

    def __init__(
        self,
        dataset: WindowDataset,
        cluster_id: int,
        num_clusters: int,
        shards: Shards = "iid",
    ) -> None:
        """View `dataset`: "iid", "contiguous" or "skewed" parts of it, see `dsx.data.shards`.

        Raises ValueError if the cluster does not exist or gets no window, or as `windows_of`.
        """
        _check_member("cluster_id", cluster_id, "num_clusters", num_clusters)
        if len(dataset) < num_clusters:
            raise ValueError(
                f"the dataset has {len(dataset)} window(s), num_clusters={num_clusters} leave none "
                f"for cluster_id={cluster_id}; use a larger corpus or a shorter sequence_length"
            )
        self.dataset = dataset
        self.cluster_id = cluster_id
        self.num_clusters = num_clusters
        self.shards: Shards = shards
        self._windows = windows_of(dataset, cluster_id, num_clusters, shards)
        logger.info("data: %s", self)

    def __str__(self) -> str:
        """Say which of the samples are this cluster's."""
        total, step = len(self.dataset), self.num_clusters
        if step == 1:
            return f"all {total:,} samples are read"
        numbers = [int(self._windows[i]) for i in (0, min(1, len(self) - 1), -1)]
        kind = "" if self.shards == "iid" else f" ({self.shards})"
        return (
            f"cluster {self.cluster_id} of {step} reads {len(self):,} of {total:,} samples{kind}: "
            f"{numbers[0]}, {numbers[1]}, ..., {numbers[2]}"
        )

    def __len__(self) -> int:
        """Return how many windows the cluster uses: the same number in every cluster.

        Clusters that took different numbers of steps would wait for each other.
        """
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        """Return the cluster's window `index`, counted from its own first one."""
        if isinstance(index, OfWhole):
            return self.dataset[int(index)]
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is outside 0..{len(self) - 1} of this cluster")
        return self.dataset[int(self._windows[index])]


class ClusterBatches:
    """Endless iterator of int64 batches [micro_batch_size, window_length] for one rank.

    `rank` and `world_size` count the data-parallel ranks inside the cluster. Windows are read when
    asked for, never ahead, so `state_dict` is the position of what was consumed.
    """

    def __init__(
        self,
        dataset: WindowDataset,
        micro_batch_size: int,
        *,
        cluster_id: int,
        num_clusters: int,
        rank: int,
        world_size: int,
        seed: int,
        shards: Shards = "iid",
    ) -> None:
        """Start at epoch 0. `shards` as of ClusterShard.

        Raises ValueError if the cluster's windows do not fill one round.
        """
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative; try 0")
        _check_member("rank", rank, "world_size", world_size)
        self.shard = ClusterShard(dataset, cluster_id, num_clusters, shards)
        self.round_size = world_size * micro_batch_size
        if len(self.shard) < self.round_size:
            raise ValueError(
                f"cluster {cluster_id} has {len(self.shard)} window(s), one round of world_size="
                f"{world_size} times micro_batch_size={micro_batch_size} needs {self.round_size}; "
                "use a larger corpus, a smaller micro_batch_size or a shorter sequence_length"
            )
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.offset = 0
        self._others = Others()
        self._shards_of_others: dict[tuple[int, int], ClusterShard] = {}
        self._order = self._permutation()

    def __iter__(self) -> ClusterBatches:
        """Return itself: a second loop goes on where the first stopped."""
        return self

    def __next__(self) -> Tensor:
        """Return this rank's part of the next round; never raises StopIteration."""
        first = [self._window_of(one) for one in self._others.take(self.round_size)]
        missing = self.round_size - len(first)
        if missing and len(self.shard) - self.offset < missing:
            self.epoch += 1
            self.offset = 0
            self._order = self._permutation()
        own = self._order[self.offset : self.offset + missing]
        self.offset += missing
        chosen = [*first, *((self.shard, int(index)) for index in own)]
        return torch.stack([s[index] for s, index in chosen[self.rank :: self.world_size]])

    @property
    def samples_per_epoch(self) -> int | None:
        """The windows of each cluster; None for data of this cluster's own."""
        return len(self.shard) if self.shard.num_clusters > 1 else None

    def place(self) -> tuple[int, int]:
        """Return the windows read of the own sequence, and those of what others have left."""
        return self.epoch * len(self.shard) + self.offset, self._others.read

    def left(self) -> list[Stretch]:
        """Return what is still to be read of others'."""
        return self._others.left()

    def require_same_data(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless a saved position is in this dataset, in this seed's order."""
        self._require_same(state, {*self._identity()} - {"cluster_id", "num_clusters"})

    def begin_at(self, place: int, read: int = 0, left: Sequence[Stretch] = ()) -> None:
        """Go to a place in the own sequence, behind `left` of others', of which some is read."""
        self.epoch, self.offset = divmod(place, len(self.shard))
        self._others = Others(read, left)
        self._order = self._permutation()

    def take_over(self, stretches: Sequence[Stretch]) -> None:
        """Read what others have left before going on."""
        self._others.add(stretches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks of the cluster, and what must match on load."""
        position = {"epoch": self.epoch, "offset": self.offset, **self._identity()}
        others = self._others.state_dict()
        return {**position, "others": others} if others else position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly after the last consumed window, in place.

        `world_size` and `micro_batch_size` may differ from when `state` was taken. Raises
        ValueError if the state belongs to another seed, cluster or dataset; nothing changes then.
        """
        self._require_same(state, self._identity())
        epoch, offset = state.get("epoch", -1), state.get("offset", -1)
        if epoch < 0 or not 0 <= offset <= len(self.shard):
            raise ValueError(
                f"the saved data position epoch={epoch}, offset={offset} is damaged; epoch must be "
                f"at least 0 and offset in 0..{len(self.shard)}: load another checkpoint"
            )
        self.epoch = epoch
        self.offset = offset
        self._others = Others.of_state(state.get("others"))
        self._order = self._permutation()

    def _require_same(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        for name, expected in self._identity().items():
            saved = state.get(name, "iid" if name == "shards" else None)  # there was no other kind
            if name in names and saved != expected:
                raise ValueError(
                    f"the saved data position has {name}={saved}, this run has "
                    f"{name}={expected}; resume with the saved value, or do not load the position "
                    "to start the data anew"
                )

    def _identity(self) -> dict[str, Any]:
        """Return what decides which window comes next, besides the position."""
        return {
            "seed": self.seed,
            "cluster_id": self.shard.cluster_id,
            "num_clusters": self.shard.num_clusters,
            "shards": self.shard.shards,
            "num_windows": len(self.shard.dataset),
            "window_length": self.shard[0].numel(),
        }

    def _permutation(self) -> npt.NDArray[np.int64]:
        return order_of(self.seed, self.epoch, self.shard.cluster_id, len(self.shard))

    def _window_of(self, one: Stretch) -> tuple[ClusterShard, int]:
        """Return whose shard the window at a place of another cluster's sequence is in, and where.

        Only the order of one epoch is kept of each, as stretches are read one after another.
        """
        own, of = self.shard, (one.of, one.among or self.shard.num_clusters)
        if of not in self._shards_of_others:
            self._shards_of_others[of] = ClusterShard(own.dataset, *of, own.shards)
        shard = self._shards_of_others[of]
        epoch, offset = divmod(one.start, len(shard))
        order = self._others.order_of(
            *of, epoch, lambda: order_of(self.seed, epoch, one.of, len(shard))
        )
        return shard, int(order[offset])


def order_of(seed: int, epoch: int, cluster_id: int, length: int) -> npt.NDArray[np.int64]:
    """Return a cluster's order of its windows in an epoch, [length]."""
    seeds = np.random.SeedSequence([seed, epoch, cluster_id])
    # RandomState's stream is frozen by numpy for good; that of Generator may change.
    return np.random.RandomState(np.random.MT19937(seeds)).permutation(length)


def _check_member(index_name: str, index: int, count_name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{count_name}={count} must be at least 1")
    if not 0 <= index < count:
        raise ValueError(f"{index_name}={index} must lie in 0..{count - 1} ({count_name}={count})")
