"""A process group of ranks that are not there, and tensors without memory: torch's own fakes.

torch's "fake" backend makes groups of any size at once and carries nothing, and its FakeTensorMode
gives tensors a shape, a type and a place in a storage that takes no bytes. Both are what torch
tests its compiler with. What ranks tell each other while they are built are plain values; whoever
builds them knows what the others would say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

Answers = Callable[[Any, Sequence[int]], list[Any]]


def echo(own: Any, ranks: Sequence[int]) -> list[Any]:
    """Let everyone say what this rank says."""
    return [own for _ in ranks]


@contextmanager
def in_cluster(rank: int, world_size: int, answers: Answers = echo) -> Generator[None, None, None]:
    """Be one rank of a cluster of so many; the others' values are `answers(own, ranks)`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch_distributed: Any = dist
    gather_object, hook = torch_distributed.all_gather_object, sys.excepthook

    def gather(everyone: list[Any], own: Any, group: Any = None) -> None:
        members = torch_distributed.group.WORLD if group is None else group
        everyone[:] = answers(own, dist.get_process_group_ranks(members))

    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    torch_distributed.all_gather_object = gather
    try:
        yield
    finally:
        torch_distributed.all_gather_object = gather_object
        sys.excepthook = hook  # which torch has replaced, to name the rank
        dist.destroy_process_group()


@contextmanager
def seen_from(rank: int) -> Generator[None, None, None]:
    """Let code that asks for its rank, of the world or of a group, be told another one's.

    Whoever asks this has chosen a rank whose place in groups that it is not in is that of the one
    that was built, in groups of its own.
    """
    torch_distributed: Any = dist
    get_rank = torch_distributed.get_rank
    built = get_rank()

    def number(group: Any = None) -> int:
        members = torch_distributed.group.WORLD if group is None else group
        ranks = dist.get_process_group_ranks(members)
        return ranks.index(rank if rank in ranks else built)

    torch_distributed.get_rank = number
    try:
        yield
    finally:
        torch_distributed.get_rank = get_rank


def no_memory() -> Any:
    """Return the mode under which tensors take no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)
