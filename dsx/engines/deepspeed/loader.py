"""DeepSpeed's loader of one rank, whose next sample is known: after a resume, and between others'.

What a checkpoint says of it, and which dataset it reads, is in data.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from dsx.data.cluster_batches import ClusterShard, OfWhole
from dsx.data.deal import Stretch
from dsx.data.reading import Others
from dsx.data.shards import windows_of

logger = logging.getLogger(__name__)


class ResumedSampler:
    """A sampler that leaves out what was read before a resume, once.

    `rest`: what it gives in that epoch in place of the sampler's own, if anything.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.skipped = 0
        self.rest: Sequence[int] | None = None

    def __iter__(self) -> Iterator[int]:
        skipped, self.skipped = self.skipped, 0
        rest, self.rest = self.rest, None
        return islice(iter(self._sampler if rest is None else rest), skipped, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self._sampler, name)  # set_epoch, and what else it has


class ResumableLoader:
    """DeepSpeed's loader of one rank, whose next sample is known."""

    def __init__(self, loader: Any, num_replicas: int) -> None:
        self._loader = loader
        self._sampler = loader.data_sampler = ResumedSampler(loader.data_sampler)
        self._read_together = loader.batch_size * num_replicas
        self._num_replicas = num_replicas
        self._start = 0
        self._next_after: int | None = None
        self._has_begun = False
        self.epoch = 0  # how many have been ended
        self.consumed = 0  # samples of this epoch, of all ranks
        self.others = Others()  # what is read before them
        self.after: int | None = None  # samples that plain DeepSpeed had read of this epoch
        self.before_reading: Callable[[], object] = lambda: None  # called where an epoch begins

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, of all ranks."""
        return len(self._loader) * self._read_together

    def __iter__(self) -> ResumableLoader:
        """Start an epoch, the first one after a resume in its middle."""
        self.before_reading()
        if self._has_begun and self.consumed and not self._start:
            self.epoch += 1  # the script has left that one
        self._sampler.skipped = self._start // self._num_replicas
        self.consumed, self._start, self._has_begun = self._start, 0, True
        self.after, self._next_after = self._next_after, None
        if self.after is not None:
            self._sampler.rest = rest_of_epoch(self._sampler, self._loader.dataset, self.after)
        upcoming = self.others.upcoming()
        is_between = self.after is None and self.consumed % self._num_replicas > 0
        if upcoming or is_between:  # a place that the ranks do not come to by turns
            self._read_first([OfWhole(self._sample_at(one)) for one in upcoming])
        iter(self._loader)
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._loader)
        except StopIteration:
            self.consumed, self.after, self._has_begun = 0, None, False
            self.epoch += 1
            raise
        self.consumed += self._read_together - self.others.skip(self._read_together)
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self._loader, name)

    def go_to(self, consumed: int, after: int | None = None) -> None:
        """Read on after so many samples; in an iteration that has begun, too.

        With `after` of the rest of an epoch of which plain DeepSpeed had read so many.
        """
        self._start = self.consumed = consumed
        self._next_after = self.after = after
        if self._has_begun:
            self._has_begun = False
            iter(self)

    def take_over(self, stretches: Sequence[Stretch]) -> None:
        """Read what others have left next; of the rest of plain DeepSpeed's epoch nothing is."""
        if self.after is not None or self._next_after is not None:
            logger.warning(
                "what a lost cluster has left of the epoch that plain DeepSpeed began is not read"
            )
            return
        self.others.add(stretches)
        self.go_to(self.consumed)

    def _read_first(self, others: list[int]) -> None:
        """Let this rank read its part of these, then of the epoch's rest."""
        sampler = self._sampler
        own = _order_of(sampler, sampler.epoch, len(self._loader.dataset))
        rest = [*others, *own[self.consumed :]]
        sampler.skipped, sampler.rest = 0, _part_of_rank(sampler, rest)

    def _sample_at(self, one: Stretch) -> int:
        """Return the sample, of the whole dataset, at a place of another cluster's sequence."""
        shard: ClusterShard = self._loader.dataset
        of = one.of, one.among or shard.num_clusters
        theirs = windows_of(shard.dataset, *of, shard.shards)
        epoch, offset = divmod(one.start, len(theirs))
        # a script that calls set_epoch does so in each, in all clusters
        is_set = self._sampler.epoch == self.epoch
        of_sampler = epoch if is_set and self.epoch else self._sampler.epoch
        order = self.others.order_of(
            *of, epoch,
            lambda: np.array(_order_of(self._sampler, of_sampler, len(theirs)), dtype=np.int64),
        )  # fmt: skip
        return int(theirs[int(order[offset])])


def rest_of_epoch(sampler: Any, shard: ClusterShard, read: int) -> list[int]:
    """Return what this rank reads of the epoch of which plain DeepSpeed has read `read` samples.

    That run's order is the one of this sampler's seed and epoch over the whole dataset, whatever
    its number of ranks. All clusters get equally many of those left, so that up to C - 1 are left
    out; within a cluster they are dealt, and padded, as `DistributedSampler` does.
    """
    left = _order_of(sampler, sampler.epoch, len(shard.dataset))[read:]
    own = left[shard.cluster_id :: shard.num_clusters][: len(left) // shard.num_clusters]
    return [OfWhole(index) for index in _part_of_rank(sampler, own)]


def _order_of(sampler: Any, epoch: int, count: int) -> list[int]:
    """Return the order of so many samples in an epoch of a sampler, as `DistributedSampler` has."""
    if not sampler.shuffle:
        return list(range(count))
    generator = torch.Generator()
    generator.manual_seed(sampler.seed + epoch)
    return torch.randperm(count, generator=generator).tolist()


def _part_of_rank(sampler: Any, indices: list[int]) -> list[int]:
    """Return what this rank reads of these, padded as `DistributedSampler` does."""
    missing = -len(indices) % sampler.num_replicas
    padded = indices + (indices * (missing // max(len(indices), 1) + 1))[:missing]
    return padded[sampler.rank :: sampler.num_replicas]
