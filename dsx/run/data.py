"""A framework's training data, cut once per cluster; evaluation data is never cut.

What all clusters share is divided: each reads every C-th sample, as many as the others, or of a
stream every C-th example or shard. What is a cluster's own is read whole: by `clusters.data`, or
under "auto" by a look at three samples, as for `dsx.initialize(training_data=...)`. Into a stream
nobody looks: under "auto" it is divided. Within the cluster the framework divides on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from dsx.comm.world import World
from dsx.data.cluster_batches import ClusterShard
from dsx.engines.deepspeed.data import source_of
from dsx.training.data_sources import share_data

logger = logging.getLogger(__name__)
_MARK = "is_cut_for_cluster"
_WHOLE = "whole_of_clusters"


class ClusterStream(IterableDataset[Any]):
    """Every C-th example of a stream, from the `cluster_id`-th on."""

    def __init__(self, stream: Any, cluster_id: int, num_clusters: int) -> None:
        self._stream = stream
        self._cluster_id = cluster_id
        self._num_clusters = num_clusters

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._stream), self._cluster_id, self._stop, self._num_clusters)

    @property
    def _stop(self) -> int | None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self._stream, name)  # set_epoch, and what else it has


class SizedClusterStream(ClusterStream):
    """The same of a stream that knows its length: as many examples in every cluster."""

    def __len__(self) -> int:
        return len(self._stream) // self._num_clusters

    @property
    def _stop(self) -> int:
        return len(self) * self._num_clusters


class ClusterPart(ClusterShard):
    """A cluster's part of a dataset that scripts may ask for what else it has."""

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self.dataset, name)


def is_cut(data: Any) -> bool:
    """Whether data is this cluster's part already, also inside of what divides it further."""
    while data is not None:
        if isinstance(data, ClusterShard) or getattr(data, _MARK, False):
            return True
        data = getattr(data, "dataset", None)
    return False


def whole_of(data: Any) -> Any:
    """Return what `part_for_cluster` has cut, of its part; None for anything else."""
    if isinstance(data, ClusterPart):
        return data.dataset
    return getattr(data, _WHOLE, None)


def part_for_cluster(data: Any, world: World) -> Any:
    """Return this cluster's part of a map-style dataset, without a look at the others'."""
    part = _part(data, world, is_stream=False)
    if not isinstance(part, ClusterPart):
        setattr(part, _WHOLE, data)
    if world.rank == 0:
        logger.warning(
            "dsx: cluster %d reads %s of %s samples of what is shuffled, for training; what is not "
            "is read whole", world.cluster_id, f"{len(part):,}", f"{len(data):,}",
        )  # fmt: skip
    return part


def cut_for_cluster(data: Any, world: World, wanted: str) -> Any:
    """Return what this cluster reads of training data. Collective over all ranks of all clusters.

    `wanted` is `clusters.data`. What has been cut comes back as it is.
    """
    if data is None or is_cut(data):
        return data
    is_stream = is_a_stream(data)
    part = _part(data, world, is_stream) if is_shared(data, world, wanted) else data
    _tell(data, part, world, is_stream)
    return part


def is_a_stream(data: Any) -> bool:
    """Whether nobody can look into data, or knows its order."""
    return not hasattr(data, "__len__") or isinstance(data, IterableDataset)


def is_shared(data: Any, world: World, wanted: str) -> bool:
    """Whether data is to be divided. Collective over all ranks of all clusters."""
    if is_a_stream(data):
        return wanted != "own"
    return share_data(world.rendezvous, wanted, [source_of(data)])


def _part(data: Any, world: World, is_stream: bool) -> Any:
    cluster, count = world.cluster_id, world.num_clusters
    datasets = sys.modules.get("datasets")  # of Hugging Face, or a package of the script's own
    streams: Any = getattr(datasets, "IterableDataset", ())
    if isinstance(data, streams) and hasattr(datasets, "Features"):
        from datasets.distributed import split_dataset_by_node  # pyright: ignore

        part: Any = split_dataset_by_node(data, rank=cluster, world_size=count)
    elif is_stream:
        kind = SizedClusterStream if hasattr(data, "__len__") else ClusterStream
        part = kind(data, cluster, count)
    elif isinstance(data, getattr(datasets, "Dataset", ())) and hasattr(datasets, "Features"):
        part = data.select(range(cluster, len(data) // count * count, count))
    else:
        return ClusterPart(data, cluster, count)
    setattr(part, _MARK, True)
    return part


def _tell(data: Any, part: Any, world: World, is_stream: bool) -> None:
    if world.rank:
        return
    if part is data:
        what = "all of its own training data"
    elif is_stream:
        what = (
            f"one in {world.num_clusters} of the streamed examples (clusters.data='own' reads all "
            "of them, for a stream of this cluster's own)"
        )
    else:
        what = f"{len(part):,} of {len(data):,} samples"
    logger.warning("dsx: cluster %d reads %s", world.cluster_id, what)
