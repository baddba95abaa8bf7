"""Which cluster and rank reads which window, with an exact position for the checkpoint.

Cluster m reads only windows w with w % num_clusters == m: clusters are disjoint for ever, whatever
the seed or the epoch. Each epoch visits the cluster's windows in a new permutation, seeded from
(seed, epoch, cluster_id) and equal on all ranks of the cluster; the cluster is in the seed so that
two clusters do not read neighbouring windows of the text in the same step.

A round takes world_size * micro_batch_size windows in that order, rank r every world_size-th from
the r-th on. A window is read at most once per epoch by one rank; a tail that fills no whole round
is dropped for that epoch. The position (epoch, offset) is the same on all ranks of a cluster and
does not depend on the round, so a cluster may resume with another world_size or micro_batch_size:
it goes on with the very next window.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset


logger = logging.getLogger(__name__)


class WindowDataset(Protocol):
    """A map-style dataset of equally long windows, such as TokenWindows."""

    def __len__(self) -> int:
        """Return the number of windows."""
        ...

    def __getitem__(self, index: int, /) -> Tensor:
        """Return window `index`, int64 [window_length]."""
        ...


class ClusterShard(Dataset[Tensor]):
    """The windows of one cluster as a dataset, for a DataLoader of your own.

    Hand it to `deepspeed.initialize(training_data=...)` or to a DataLoader with a sampler over the
    cluster's ranks; ClusterBatches does that part and keeps the position as well.
    """

    def __init__(self, dataset: WindowDataset, cluster_id: int, num_clusters: int) -> None:
        """View `dataset`. Raises ValueError if the cluster does not exist or gets no window."""
        _check_member("cluster_id", cluster_id, "num_clusters", num_clusters)
        if len(dataset) < num_clusters:
            raise ValueError(
                f"the dataset has {len(dataset)} window(s), num_clusters={num_clusters} leave none "
                f"for cluster_id={cluster_id}; use a larger corpus or a shorter sequence_length"
            )
        self.dataset = dataset
        self.cluster_id = cluster_id
        self.num_clusters = num_clusters
        logger.info("data: %s", self)

    def __str__(self) -> str:
        """Say which of the samples are this cluster's."""
        total, step = len(self.dataset), self.num_clusters
        if step == 1:
            return f"all {total:,} samples are read"
        last = (len(self) - 1) * step + self.cluster_id
        return (
            f"cluster {self.cluster_id} of {step} reads {len(self):,} of {total:,} samples: "
            f"{self.cluster_id}, {self.cluster_id + step}, ..., {last}"
        )

    def __len__(self) -> int:
        """Return how many windows the cluster uses: the same number in every cluster.

        Clusters that took different numbers of steps would wait for each other.
        """
        return len(self.dataset) // self.num_clusters

    def __getitem__(self, index: int) -> Tensor:
        """Return the cluster's window `index`, which is index * num_clusters + cluster_id."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is outside 0..{len(self) - 1} of this cluster")
        return self.dataset[index * self.num_clusters + self.cluster_id]


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
    ) -> None:
        """Start at epoch 0. Raises ValueError if the cluster's windows do not fill one round."""
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative; try 0")
        _check_member("rank", rank, "world_size", world_size)
        self.shard = ClusterShard(dataset, cluster_id, num_clusters)
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
        self._order = self._permutation()

    def __iter__(self) -> ClusterBatches:
        """Return itself: a second loop goes on where the first stopped."""
        return self

    def __next__(self) -> Tensor:
        """Return this rank's part of the next round; never raises StopIteration."""
        if len(self.shard) - self.offset < self.round_size:
            self.epoch += 1
            self.offset = 0
            self._order = self._permutation()
        chosen = self._order[self.offset : self.offset + self.round_size][
            self.rank :: self.world_size
        ]
        batch = torch.stack([self.shard[int(index)] for index in chosen])
        self.offset += self.round_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position, equal on all ranks of the cluster, and what must match on load."""
        return {"epoch": self.epoch, "offset": self.offset, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue exactly after the last consumed window, in place.

        `world_size` and `micro_batch_size` may differ from when `state` was taken. Raises
        ValueError if the state belongs to another seed, cluster or dataset; nothing changes then.
        """
        for name, expected in self._identity().items():
            if state.get(name) != expected:
                raise ValueError(
                    f"the saved data position has {name}={state.get(name)}, this run has "
                    f"{name}={expected}; resume with the saved value, or do not load the position "
                    "to start the data anew"
                )
        epoch, offset = state.get("epoch", -1), state.get("offset", -1)
        if epoch < 0 or not 0 <= offset <= len(self.shard):
            raise ValueError(
                f"the saved data position epoch={epoch}, offset={offset} is damaged; epoch must be "
                f"at least 0 and offset in 0..{len(self.shard)}: load another checkpoint"
            )
        self.epoch = epoch
        self.offset = offset
        self._order = self._permutation()

    def _identity(self) -> dict[str, int]:
        """Return what decides which window comes next, besides the position."""
        return {
            "seed": self.seed,
            "cluster_id": self.shard.cluster_id,
            "num_clusters": self.shard.num_clusters,
            "num_windows": len(self.shard.dataset),
            "window_length": self.shard[0].numel(),
        }

    def _permutation(self) -> npt.NDArray[np.int64]:
        """Return this epoch's order of the shard, [len(shard)]."""
        seeds = np.random.SeedSequence([self.seed, self.epoch, self.shard.cluster_id])
        # RandomState's stream is frozen by numpy for good; that of Generator may change.
        return np.random.RandomState(np.random.MT19937(seeds)).permutation(len(self.shard))


def _check_member(index_name: str, index: int, count_name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{count_name}={count} must be at least 1")
    if not 0 <= index < count:
        raise ValueError(f"{index_name}={index} must lie in 0..{count - 1} ({count_name}={count})")
