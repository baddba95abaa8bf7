"""The ranks of a cluster that serve one pipeline stage, and what they tell each other.

Every collective of the outer step runs over them and goes no further: the stages of a pipeline
launch and apply at steps of their own. Adapters pass the group that their engine has, or make one.

What the ranks of a cluster agree on at a boundary (was a round refused, how long did it take, was
a tied weight written) is in host memory already, and the next Python statement depends on it.
Sent through NCCL it would make the host wait until the accelerator has run all that was queued
before. So these numbers have a gloo group of their own, beside the engine's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.comm.world import current_world
from dsx.core.on_device import on_device
from dsx.core.transport import PeerLost
from dsx.core.types import Fragment
from dsx.core.waits import waiting_for

_LAZY = "TORCH_GLOO_LAZY_INIT"


def collective_device() -> torch.device:
    """Return where the backend of the cluster's collectives takes tensors."""
    is_nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


class OneRank:
    """A cluster of one rank: all there is to tell is known already (see core/engine.py)."""

    shard = (0, 1)

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Return `values`: this rank holds every parameter whole."""
        return values

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return `values`."""
        return values

    def max_and_sum(self, values: Tensor, summed: Tensor) -> tuple[Tensor, Tensor]:
        """Return both."""
        return values, summed

    def max_over_stages(self, values: Tensor) -> Tensor:
        """Return `values`: there is one stage."""
        return values

    def begin_max_over_ranks(self, values: Tensor) -> Callable[[], Tensor]:
        """Return what gives `values`."""
        return lambda: values

    def gather(self, value: Any) -> Sequence[Any]:
        """Return the value alone."""
        return [value]

    def layouts(self, own: Sequence[Fragment]) -> tuple[Sequence[Sequence[Fragment]], int]:
        """Return this rank's fragments alone."""
        return [own], 0

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Copy."""
        incoming[0].copy_(outgoing[0])


class ClusterCollectives:
    """`ClusterRanks` (core/engine.py) by collectives over one `group`.

    What is on the host stays there, see `beside`. Creating it is collective in the cluster.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._host_group = beside(group)
        self._cluster_group = beside(None)
        self._device = collective_device()

    @property
    def shard(self) -> tuple[int, int]:
        """Return this rank's place in its stage."""
        return dist.get_rank(self._group), dist.get_world_size(self._group)

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Return the shards' sum in rank order."""
        total = torch.zeros_like(values)
        for shard in self._gather(values):
            total.add_(shard)
        return total

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise largest of the shards' values."""
        return torch.stack(self._gather(values)).amax(0)

    def max_and_sum(self, values: Tensor, summed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest of the first and the sums of the second, in one message."""
        everyone = self._gather(torch.cat([values.flatten(), summed]))
        total = torch.zeros_like(summed)
        for shard in everyone:
            total.add_(shard[values.numel() :])
        largest = torch.stack(everyone).amax(0)[: values.numel()]
        return largest.view(values.shape), total

    def max_over_stages(self, values: Tensor) -> Tensor:
        """Return the elementwise largest of all of the cluster's ranks, on the host."""
        largest = values.to("cpu", copy=True)
        with _among(self._cluster_group, "all ranks of this cluster (largest values)"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._cluster_group)
        return largest

    def begin_max_over_ranks(self, values: Tensor) -> Callable[[], Tensor]:
        """Start finding the elementwise largest of the shards' values."""
        largest = values.to(self._device, copy=True)
        work: Any = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        if largest.is_cuda:
            return _answer_on_host(work, largest)

        def wait() -> Tensor:
            with _among(self._group, "the ranks of this stage (largest values)"):
                work.wait()
            return largest

        return wait

    def gather(self, value: Any) -> Sequence[Any]:
        """Return every shard's value, sent over the host."""
        return gather_objects(value, self._host_group)

    def layouts(self, own: Sequence[Fragment]) -> tuple[Sequence[Sequence[Fragment]], int]:
        """Return every rank's fragments, and this rank's place among them."""
        return gather_objects(own, self._group), self.shard[0]

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Exchange shards over the ranks that share them, on the device of their backend."""
        sent = torch.cat([t.to(self._device) for t in outgoing])
        received = torch.empty(sum(t.numel() for t in incoming), device=self._device)
        here, away = [[t.numel() for t in tensors] for tensors in (incoming, outgoing)]
        with _among(self._group, "the ranks of this stage (whole matrices)"):
            dist.all_to_all_single(received, sent, here, away, group=self._group)
        for tensor, part in zip(incoming, received.split(here), strict=True):
            tensor.copy_(part)

    def _gather(self, values: Tensor) -> list[Tensor]:
        """Return the values of every rank that shares the fragments, sent from where they are."""
        is_on_host = values.device.type == "cpu"
        group = self._host_group if is_on_host else self._group
        own = values if is_on_host else values.to(self._device)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        with _among(group, "the ranks of this stage (values of every rank)"):
            dist.all_gather(everyone, own.contiguous(), group=group)
        return [other.to(values.device) for other in everyone]


def _answer_on_host(work: Any, values: Tensor) -> Callable[[], Tensor]:
    """Copy a collective's result to the host beside the compute stream, which waits for neither."""
    stream = torch.cuda.Stream(values.device)
    answer = torch.empty(values.shape, pin_memory=True)
    arrived = torch.cuda.Event()
    with torch.cuda.stream(stream):
        work.wait()  # lets this stream wait, not the host
        answer.copy_(values, non_blocking=True)
        arrived.record(stream)
    values.record_stream(stream)

    def wait() -> Tensor:
        what = "the ranks of this stage (largest values)"
        with waiting_for(what, None), on_device(values.device):
            arrived.synchronize()
        return answer

    return wait


@contextmanager
def _among(group: Any, who: str) -> Generator[None, None, None]:
    """Note whom this rank waits for, and name them where one has ended or does not come in time."""
    try:
        with waiting_for(who, None):
            yield
    except RuntimeError as error:  # of gloo, within the group's own limit; NCCL's end the process
        raise PeerLost(
            f"rank {dist.get_rank()} waits for {who}, of which one has ended, or does not come: "
            f"{str(error).splitlines()[0]}"
        ) from error


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return every rank's value, in rank order. Collective over `group`, or the cluster."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with _among(group, "the ranks of this cluster (small values)"):
        dist.all_gather_object(everyone, value, group=group)
    return everyone


def from_first(value: Any) -> Any:
    """Return rank 0's value on every rank of the cluster; nobody goes on before rank 0 has."""
    values = [value]
    with _among(None, "rank 0 of this cluster"):
        dist.broadcast_object_list(values, src=0)
    return values[0]


def meet_in_cluster(what: str) -> None:
    """Return once all ranks of the cluster have come here; `what` they do, for a stall's report."""
    with _among(None, f"all ranks of this cluster: {what}"):
        dist.barrier()


def beside(group: Any) -> Any:
    """Return a group of the same ranks whose collectives take host memory: gloo's, or `group`.

    Collective over the whole world where it makes one: every rank names the group it is in.
    """
    if _takes_host_memory(group):
        return group
    own = tuple(dist.get_process_group_ranks(group))
    made = {ranks: new_host_group(ranks) for ranks in sorted(set(gather_objects(own)))}
    return made[own]


def new_host_group(ranks: Sequence[int]) -> Any:
    """Return a new group on the host. Collective over the whole world, members or not.

    What its members use of each other is connected here, as long as a store is there: a ring. All
    with all would be N^2 addresses read from the store.
    """
    world = current_world()
    limit = None if world is None else timedelta(seconds=world.in_cluster_seconds)
    with _connected_when_used():
        group: Any = dist.new_group(list(ranks), timeout=limit, backend=dist.Backend.GLOO)
    if dist.get_rank() in ranks:
        with _among(group, "the ranks of a new group"):
            dist.all_gather([torch.zeros(1) for _ in ranks], torch.zeros(1), group=group)
            dist.all_reduce(torch.zeros(1), group=group)
    return group


@contextmanager
def _connected_when_used() -> Generator[None, None, None]:
    """Have torch make gloo groups that connect two ranks when they have to do with each other.

    It takes that from its own variable alone; a reader's setting stays.
    """
    if (given := os.environ.get(_LAZY)) is None:
        os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[_LAZY]


def new_groups(ranks: Sequence[int]) -> tuple[Any, Any]:
    """Return new groups of the world's backend and on the host: one and the same where it is gloo.

    Collective over the whole world, members or not.
    """
    group: Any = dist.new_group(list(ranks))
    return group, group if _takes_host_memory(None) else new_host_group(ranks)


def _takes_host_memory(group: Any) -> bool:
    """Whether a group is gloo's, or a dry run's, whose collectives carry nothing."""
    return dist.get_backend(group) in (dist.Backend.GLOO, "fake")
