"""Small agreements inside a cluster, on the host: they wait for no kernel and launch none.

What the ranks of a cluster agree on at a boundary (was a round refused, how long did it take, was
a tied weight written) is in host memory already, and the next Python statement depends on it.
Sent through NCCL it would make the host wait until the accelerator has run all that was queued
before. So these numbers have a gloo group of their own, beside the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def beside(group: Any) -> Any:
    """Return a group of the same ranks whose collectives take host memory: gloo's, or `group`.

    Collective over the whole world where it makes one: every rank names the group it is in.
    """
    if dist.get_backend(group) == dist.Backend.GLOO:
        return group
    own = tuple(dist.get_process_group_ranks(group))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    made = {ranks: new_host_group(ranks) for ranks in sorted(set(everyone))}
    return made[own]


def new_host_group(ranks: Sequence[int]) -> Any:
    """Return a new group on the host. Collective over the whole world, members or not."""
    group: Any = dist.new_group(list(ranks), backend=dist.Backend.GLOO)
    return group


def new_groups(ranks: Sequence[int]) -> tuple[Any, Any]:
    """Return new groups of the world's backend and on the host: one and the same where it is gloo.

    Collective over the whole world, members or not.
    """
    group: Any = dist.new_group(list(ranks))
    is_on_host = dist.get_backend() == dist.Backend.GLOO
    return group, group if is_on_host else new_host_group(ranks)
