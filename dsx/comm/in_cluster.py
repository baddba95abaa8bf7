"""What all ranks of one cluster tell each other, pipeline stages and copies alike: on the host.

Over a gloo group of its own, so that no collective of the inner engine is waited for with it, and
no store once it is connected. It is not registered with torch, whose world an engine may make anew.
Every rank of the cluster calls the same, in the same order, on its training thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.comm.gloo_device import gloo_device
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for


class InCluster:
    """The ranks of this cluster, which all make it; `store` is a key space for that alone."""

    def __init__(
        self,
        cluster_id: int,
        rank: int,
        world_size: int,
        store: dist.Store,
        join_deadline_seconds: float,
        deadline_seconds: float,
    ) -> None:
        self._cluster_id = cluster_id
        self._rank, self._world_size = rank, world_size
        self._deadline_seconds = join_deadline_seconds
        self._group: Any = None
        if world_size > 1:
            options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore
            options._timeout = timedelta(seconds=join_deadline_seconds)
            options._threads = 1
            options._devices = [_device()]
            with self._waiting("connecting"):
                self._group = dist.ProcessGroupGloo(store, rank, world_size, options)
                self._connect()
            group = self._group  # torch 2.6 has the second name alone
            set_timeout = getattr(group, "set_timeout", None) or group._set_default_timeout
            set_timeout(timedelta(seconds=deadline_seconds))
        self._deadline_seconds = deadline_seconds

    def _connect(self) -> None:
        """Make every connection that is ever used, as long as the store is there."""
        self._group.allreduce([torch.zeros(1)]).wait()
        self._group.allgather(
            [[torch.zeros(1) for _ in range(self._world_size)]], [torch.zeros(1)]
        ).wait()
        self._group.broadcast([torch.zeros(1)], _of_first()).wait()

    @property
    def rank(self) -> int:
        """This rank's number in the cluster."""
        return self._rank

    def any(self, what: str, is_so: bool) -> bool:
        """Return whether it is so on any rank; `what` names it in messages, as below."""
        flag = torch.tensor([int(is_so)])
        if self._group is not None:
            options: Any = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            with self._waiting(what):
                self._group.allreduce([flag], options).wait()
        return bool(flag)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return every rank's JSON value, in rank order."""
        own = _packed(value)
        sizes = self._gather(what, torch.tensor([own.numel()]))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        texts = self._gather(what, padded)
        return [_unpacked(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]

    def from_first(self, what: str, value: Any = None) -> Any:
        """Return rank 0's JSON value on every rank."""
        own = _packed(value)
        size = torch.tensor([own.numel()])
        self._broadcast(what, size)
        text = own if self._rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(what, text)
        return _unpacked(text)

    def _gather(self, what: str, own: Tensor) -> list[Tensor]:
        everyone = [own.clone() for _ in range(self._world_size)]
        if self._group is not None:
            with self._waiting(what):
                self._group.allgather([everyone], [own]).wait()
        return everyone

    def _broadcast(self, what: str, x: Tensor) -> None:
        if self._group is not None:
            with self._waiting(what):
                self._group.broadcast([x], _of_first()).wait()

    @contextmanager
    def _waiting(self, what: str) -> Generator[None, None, None]:
        """Note a wait, and name it in the error where a rank does not come."""
        who = f"the other {self._world_size - 1} rank(s) of cluster {self._cluster_id}"
        text = f"{what}: rank {self._rank} waits for {who}"
        try:
            with waiting_for(text, self._deadline_seconds):
                yield
        except RuntimeError as error:
            raise PeerLost(
                f"{text}, of which one has ended, or has not come within "
                f"{self._deadline_seconds:g} s: {str(error).splitlines()[0]}"
            ) from error


def _device() -> Any:
    """Return the device that torch takes for gloo groups inside a cluster.

    It connects two ranks when one has something for the other: of N ranks each has to do with a few
    (a ring and a tree), and N - 1 connections of each would be N^2 addresses read from one store.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return gloo_device(interface or None, is_lazy=True)


def _of_first() -> Any:
    options: Any = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpacked(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())
