"""Samples that know their numbers, for scripts that tell what they have read, and what was due."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from dsx.data import ClusterShard
from tests.tiny import WIDTH

NUM_SAMPLES = 60_000


class Numbered(Dataset[Any]):
    """Whose inputs begin with it."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        x[0] = index / NUM_SAMPLES
        return x, torch.tanh(x.roll(1))


def numbers_of(x: torch.Tensor) -> list[int]:
    """The numbers of a batch's samples."""
    return (x[:, 0].double() * NUM_SAMPLES).round().long().tolist()


def due(cluster: int, step: int, micro_batch: int, replicas: int, is_shuffled: bool) -> list[int]:
    """What the first rank of one of three clusters reads at a step of an undisturbed run."""
    shard = ClusterShard(range(NUM_SAMPLES), cluster, 3)  # type: ignore[arg-type]
    order = [*DistributedSampler(shard, num_replicas=replicas, rank=0, shuffle=is_shuffled)]
    return [shard[index] for index in order[micro_batch * (step - 1) : micro_batch * step]]


def require_read_as_due(
    told: list[dict[str, Any]], micro_batch: int, replicas: int, is_shuffled: bool = True
) -> None:
    """Each cluster has read, at each of its steps, what it would have read if none was lost."""
    for one in told:
        read = {int(step): numbers for step, numbers in one["read"].items()}
        assert [*read] == list(range(one["started_at"] + 1, one["step"] + 1))
        for step in (*[*read][:3], *[*read][-3:]):
            expected = due(one["cluster"], step, micro_batch, replicas, is_shuffled)
            assert read[step] == expected, (one["cluster"], step)
