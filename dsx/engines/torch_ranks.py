"""Plain PyTorch with several ranks per cluster, under DistributedDataParallel or `fully_shard`.

Or by an optimizer that parts its masters itself (distributed_adam.py). Each rank serves its own
part: of what all hold alike the r-th of n runs (replicated.py), of shards its own. So every element
leaves a cluster once. What a boundary has written is all-gathered among those that hold the same,
behind the optimizers' step; all ranks write the same fragments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from dsx.core.types import BackwardTrigger
from dsx.engines.backward_hooks import BackwardWatch
from dsx.engines.cluster_collectives import ClusterCollectives, collective_device, new_groups
from dsx.engines.data_parallel import Placement
from dsx.engines.distributed_adam import KIND
from dsx.engines.masters import Piece
from dsx.engines.multi_rank import SharedMasters
from dsx.engines.replicated import ReplicaShards
from dsx.engines.torch import Optimizers, TorchAdapter
from dsx.method.method import Method


class TorchRanksAdapter(SharedMasters, TorchAdapter):
    """One rank's part of a module that several train; creating it is collective in the cluster."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        method: Method,
        placement: Placement,
        keeps_state_on_host: bool = False,
    ) -> None:
        schedule = method.schedule
        _require_served(placement, schedule.when)
        self._placement = placement
        self._written = {}
        # launches inside the backward come between the engine's own collectives: not on its group
        self._group: Any = dist.group.WORLD
        if schedule.when is not None:
            self._group, _ = new_groups(range(dist.get_world_size()))
        super().__init__(
            model, optimizers, method.fragments, schedule.backwards, keeps_state_on_host
        )

    def _locate(
        self, parameters: Mapping[str, nn.Parameter], assignment: Sequence[Sequence[str]]
    ) -> Mapping[str, Piece]:
        self.ranks = ClusterCollectives(self._group)
        pieces, copies = self._placement.pieces, self._placement.copies
        if self._apart and self._placement.engine == "fully_shard":
            raise ValueError(
                "masters beside weights of fewer bits are not served under fully_shard: keep its "
                "parameters in fp32, with MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
            )
        if self._apart and self._placement.engine != KIND:
            pieces = {name: self._apart.piece(parameters[name]) for name in pieces}
        self._replica_shards = None
        if copies is None:
            return pieces
        self._replica_shards = ReplicaShards(assignment, pieces, copies, collective_device())
        return self._replica_shards.pieces

    def end_write(self, fragment: int) -> None:
        """Note it: weights are made anew once the ranks' parts have been gathered."""
        self._written[fragment] = None

    def sync_model_weights(self) -> None:
        """Bring every rank's part to all who hold it; collective in the cluster."""
        self._gather(range(len(self.fragments)))

    def end_inner_step(self) -> None:
        """Bring together what the boundary has written, and forget this step's gradients."""
        if self._written:
            self._gather(list(self._written))
        super().end_inner_step()

    def watch_backward(self, callback: Callable[[int], None], when: BackwardTrigger) -> None:
        """Call back with a fragment inside the backward, whose parameters rest meanwhile."""
        self._watch = BackwardWatch(
            [self._model], self._members, lambda: self._backwards, callback, allows_more=True
        )
        self._hooks += self._watch.hooks

    def _gather(self, fragments: Sequence[int]) -> None:
        self._all_gather(fragments)
        self._apart.write_weights([p for fragment in fragments for p in self._members[fragment]])
        self._placement.drop_gathered()


def _require_served(placement: Placement, when: BackwardTrigger | None) -> None:
    """Raise ValueError for launches inside the backward that the ranks' engine does not allow."""
    if when is not None and placement.engine in ("fully_shard", KIND):
        raise ValueError(
            f"dsx.schedule.when={when!r} launches a layer inside the backward, of which "
            f"{placement.engine} tells nothing: use schedule.type='streaming' with "
            "delay.type='average', or DistributedDataParallel"
        )
    if when == "after":
        raise ValueError(
            "dsx.schedule.when='after' takes a layer's optimizer step inside the backward, where "
            "DistributedDataParallel has not averaged its gradients yet: use schedule.when="
            "'before', which sends the parameters as they rest during the backward"
        )
