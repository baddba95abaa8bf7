"""C clusters in one process, around ordinary torch modules and optimizers: for research and tests.

The same loop, policies and bits as over a network, on one machine and without a launcher. Train
each cluster's model as ever, then let the clusters pass the step boundary together:

    clusters = SimulatedClusters(models, optimizers, dsx.preset("eager", num_clusters=4))
    clusters.step()        # after every optimizer.step() of all clusters
    clusters.finish()      # applies what is under way
    with clusters.averaged() as model:
        ...                # the model a finished run hands out
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dsx.checkpoint.files import first_difference, layout
from dsx.comm.in_process import InProcessHub, start_together, step_together
from dsx.core.membership import Membership
from dsx.engines.masters import dtype_name
from dsx.engines.torch import Optimizers, TorchAdapter, as_list
from dsx.method.fragments import fewer_than_usual
from dsx.method.method import Method, SettingWarning
from dsx.outer.loop import Event, OuterLoop
from dsx.outer.whole_matrices import tell_what_is_factored
from dsx.training.finish import (
    begin_comparison,
    begin_export,
    end_comparison,
    end_export,
    finish_export,
    require_own,
)

logger = logging.getLogger(__name__)
_NO_SECONDS = (
    "this method decides from measured seconds, and simulated transfers take none: it stays as it "
    "starts; give the times of the link you mean: schedule.step_seconds and transfer_seconds "
    "(adaptive), backward_seconds and transfer_seconds (layerwise), control.step_seconds and "
    "round_seconds (adaptive_rank); or a number instead of delay.steps='auto'"
)


class SimulatedClusters:
    """The clusters' outer loops over one in-process transport.

    `models` and `optimizers` are the clusters' own, in cluster order, an optimizer or a list of
    them per cluster; the models must be alike, and all take cluster 0's weights.
    `on_sync(cluster, event)` gets the record of every sync. With `num_steps`, the inner steps to be
    taken, a `SettingWarning` tells of too few rounds.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizers],
        method: Method,
        num_steps: int | None = None,
        on_sync: Callable[[int, Event], None] | None = None,
    ) -> None:
        if len(models) != len(optimizers) or not models:
            raise ValueError(
                f"{len(models)} models and {len(optimizers)} optimizers: give one of each per "
                "cluster, and at least one cluster"
            )
        holders = [id(p) for model in models for p in {*model.parameters()}]
        if len({*holders}) < len(holders):
            raise ValueError(
                "two clusters share one model object, or a parameter: give each its own, e.g. "
                "copy.deepcopy(model)"
            )
        _require_alike([_describe(model) for model in models])
        method.validate(num_clusters=len(models), num_steps=num_steps)
        if method.uses_seconds:
            warnings.warn(_NO_SECONDS, SettingWarning, stacklevel=2)
        self.models, self.optimizers, self.method = list(models), list(optimizers), method
        backwards = method.schedule.backwards
        self._adapters = [
            TorchAdapter(model, optimizer, method.fragments, backwards)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        _require_alike([{"trained": layout(a.fragments)} for a in self._adapters])
        transports = InProcessHub(Membership.of(len(models))).transports()
        self.loops = [
            OuterLoop(method, adapter, transport, _for_cluster(on_sync, cluster))
            for cluster, (adapter, transport) in enumerate(
                zip(self._adapters, transports, strict=True)
            )
        ]
        self._own: list[list[Tensor]] | None = None  # masters, while models hold the average
        start_together(self.loops)
        if fewer := fewer_than_usual(method.fragments, [len(self._adapters[0].fragments)]):
            logger.info(fewer)
        tell_what_is_factored(method, self._adapters[0])

    @property
    def num_clusters(self) -> int:
        """C."""
        return len(self.models)

    @property
    def num_steps(self) -> int:
        """Inner steps taken so far."""
        return self.loops[0].history.step

    @property
    def bytes_sent(self) -> list[int]:
        """Payload bytes each cluster has sent to the others, of transfers applied so far."""
        return [loop.totals.bytes_sent for loop in self.loops]

    @property
    def num_syncs(self) -> int:
        """Fragments applied so far, per cluster."""
        return self.loops[0].totals.syncs

    def step(self, skipped: Collection[int] = ()) -> None:
        """Pass one inner step boundary, after `optimizer.step()` of every cluster.

        `skipped` are the clusters whose optimizer did not step, as a `GradScaler` has it.
        """
        require_own(self._own, "an inner step")
        step_together(self.loops, skipped)
        for adapter in self._adapters:
            adapter.end_inner_step()

    def train_step(self, compute_loss: Callable[[nn.Module, int, int], Tensor]) -> list[float]:
        """Take one inner step of every cluster and pass the boundary; return the losses.

        `compute_loss(model, cluster, step)` gives a cluster's loss; steps count from 1.
        """
        losses: list[Tensor] = []
        for cluster, (model, optimizers) in enumerate(
            zip(self.models, map(as_list, self.optimizers), strict=True)
        ):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = compute_loss(model, cluster, self.num_steps + 1)
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.detach())
        self.step()
        return [float(loss) for loss in losses]

    def finish(self) -> None:
        """Apply what is under way and compare what was applied last; at the end of training.

        Training may go on, and nothing is lost: progress that has not been launched goes with the
        next launch, and rounds that stay under way start anew.
        """
        require_own(self._own, "finish()")
        self._settle()
        for _ in zip(*(loop.draining() for loop in self.loops), strict=True):
            pass
        compared = [begin_comparison(loop) for loop in self.loops]
        for loop, started in zip(self.loops, compared, strict=True):
            end_comparison(loop, started)

    @contextmanager
    def averaged(self) -> Generator[nn.Module, None, None]:
        """Hold the finished model in every cluster's module, and yield the first of them.

        The anchor, or the mean of the clusters' parameters, as the method says. The clusters' own
        parameters return on exit.
        """
        if self._own is not None:
            yield self.models[0]
            return
        self._settle()
        for loop in self.loops:
            loop.end_boundary()
        pending = [begin_export(loop) for loop in self.loops]
        kept = [finish_export(loop, p) for loop, p in zip(self.loops, pending, strict=True)]
        self._own = kept
        try:
            yield self.models[0]
        finally:
            self._own = None
            for loop, local in zip(self.loops, kept, strict=True):
                end_export(loop, local)

    def _settle(self) -> None:
        for loop in self.loops:  # after a resume all start again what they wait for
            loop.settle()


def _describe(model: nn.Module) -> dict[str, Any]:
    """Return what has to be the same in all clusters, as plain values."""
    return {
        "parameters": [
            {"name": name, "shape": list(p.shape), "dtype": dtype_name(p)}
            for name, p in model.named_parameters()
        ]
    }


def _require_alike(descriptions: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError with the first difference between cluster 0's and another's."""
    for cluster, description in enumerate(descriptions):
        difference = first_difference(descriptions[0], description)
        if difference:
            where, first, other = difference
            raise ValueError(
                f"the models differ at {where}: cluster 0 has {first}, cluster {cluster} has "
                f"{other}; give every cluster the same model, e.g. copy.deepcopy(model)"
            )


def _for_cluster(
    on_sync: Callable[[int, Event], None] | None, cluster: int
) -> Callable[[Event], Any] | None:
    return None if on_sync is None else lambda event: on_sync(cluster, event)
