"""What all ranks of one cluster tell each other, pipeline stages and copies alike: on the host.

Over a gloo group of its own, so that no collective of the inner engine is waited for with it, and
no store. Every rank of the cluster calls the same, in the same order, on its training thread.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for


class InCluster:
    """The ranks of this cluster. Creating it is collective over them."""

    def __init__(
        self, cluster_id: int, rank: int, world_size: int, deadline_seconds: float
    ) -> None:
        self._cluster_id = cluster_id
        self._rank, self._world_size = rank, world_size
        self._deadline_seconds = deadline_seconds
        self._group: Any = None
        if world_size > 1:
            deadline = timedelta(seconds=deadline_seconds)
            self._group = dist.new_group(backend=dist.Backend.GLOO, timeout=deadline)

    @property
    def world_size(self) -> int:
        """Ranks of the cluster."""
        return self._world_size

    def any(self, what: str, is_so: bool) -> bool:
        """Return whether it is so on any rank; `what` names it in messages, as below."""
        flag = torch.tensor([int(is_so)])
        if self._group is not None:
            with self._waiting(what):
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        everyone: list[Any] = [value] * self._world_size
        if self._group is not None:
            with self._waiting(what):
                dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def from_first(self, what: str, value: Any = None) -> Any:
        """Return rank 0's value on every rank."""
        values = [value]
        if self._group is not None:
            with self._waiting(what):
                dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def _waiting(self, what: str) -> _Waiting:
        who = f"the other {self._world_size - 1} rank(s) of cluster {self._cluster_id}"
        return _Waiting(f"{what}: rank {self._rank} waits for {who}", self._deadline_seconds)


class _Waiting:
    """A context that notes a wait, and names it in the error of a rank that does not come."""

    def __init__(self, what: str, deadline_seconds: float) -> None:
        self._what, self._deadline_seconds = what, deadline_seconds
        self._wait = waiting_for(what, deadline_seconds)

    def __enter__(self) -> None:
        self._wait.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._wait.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and not isinstance(error, PeerLost):
            raise PeerLost(
                f"{self._what}, of which one has ended or did not answer within "
                f"{self._deadline_seconds:g} s (clusters.deadline_seconds): "
                f"{str(error).splitlines()[0]}"
            ) from error
