"""Which windows are whose: every cluster reads the like of all others, or its own kind.

C clusters take n = len(dataset) // C windows each, no window twice:

    iid         m, m + C, m + 2 C, ...                    what the dataset has, in each alike
    contiguous  m n ... (m + 1) n - 1                     a stretch of the corpus, as a site that
                                                          has documents of its own
    skewed      the same of the windows in the order of   as unlike as the key can make them
                the dataset's `shard_keys`

The parts follow from the dataset alone, in whole numbers, so every host finds the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, cast, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dsx.core.checks import require_choice

Shards = Literal["iid", "contiguous", "skewed"]
SHARDS: tuple[Shards, ...] = get_args(Shards)


class WindowDataset(Protocol):
    """A map-style dataset of equally long windows, such as TokenWindows."""

    def __len__(self) -> int:
        """Return the number of windows."""
        ...

    def __getitem__(self, index: int, /) -> Tensor:
        """Return window `index`, int64 [window_length]."""
        ...


@runtime_checkable
class Keyed(Protocol):
    """A dataset that can say of every window what it is like, for "skewed" shards."""

    def shard_keys(self) -> npt.NDArray[np.int64]:
        """Return a whole number per window, [len]: windows with near ones go to one cluster."""
        ...


def windows_of(
    dataset: WindowDataset, cluster_id: int, num_clusters: int, shards: Shards
) -> Sequence[int]:
    """Return the numbers of a cluster's windows, ascending; as many for every cluster.

    ValueError for another name, and where a dataset without `shard_keys` is to be skewed.
    """
    require_choice("shards", shards, Shards)
    count = len(dataset) // num_clusters
    stretch = range(cluster_id * count, (cluster_id + 1) * count)
    if shards == "iid":
        return range(cluster_id, count * num_clusters, num_clusters)
    if shards == "contiguous":
        return stretch
    if not isinstance(dataset, Keyed):
        raise ValueError(
            f"shards='skewed' needs a dataset with shard_keys(), a whole number per window; "
            f"{type(dataset).__name__} has none: add it, or take shards='contiguous'"
        )
    order = np.argsort(dataset.shard_keys(), kind="stable")  # ties: in the dataset's order
    own = np.sort(order[stretch.start : stretch.stop])
    return cast("Sequence[int]", own)
