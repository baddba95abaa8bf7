"""The outer step of one fragment: the papers' steps, in their order.

Over the flat fp32 vectors of DiLoCo's Alg. 1 (arXiv:2311.08105), lines 11 to 13: the mean of all
clusters' pseudo-gradients, weighed by CO2's staleness penalty where the method has one
(arXiv:2401.16265), steps the anchor, and the delay policy says what training goes on from: the
anchor (DiLoCo), a mix of it with the local parameters (Streaming DiLoCo, arXiv:2501.18512), a
compensated anchor (CoCoDC, arXiv:2504.17672), or an eager one. Nothing here waits, decides or
communicates between clusters; who watches the time does so around it, by `timed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsx.core.engine import EngineAdapter
from dsx.core.recorder import SpanTimer, timed
from dsx.core.types import History, SyncView
from dsx.method.ladder import Ladder
from dsx.method.method import Method
from dsx.method.outer_optimizer import OuterContext
from dsx.outer.deferral import Deferral
from dsx.outer.outer_update import OuterUpdate
from dsx.outer.per_tensor import ShardedTensors
from dsx.outer.state import StateStore
from dsx.outer.transfer import NothingYet, Transfer


@dataclass
class Arrival:
    """A transfer that has come, with its mean `[numel]`; None if it was empty or is refused.

    `under_way` are those launched after it. `report` takes numbers for the sync's record.
    """

    transfer: Transfer | NothingYet
    mean: Tensor | None
    under_way: Sequence[Transfer]
    report: dict[str, Tensor]
    timer: SpanTimer

    @property
    def fragment(self) -> int:
        """The fragment that has come."""
        return self.transfer.fragment


class OuterStep:
    """Takes the outer steps of one rank's fragments, in place of anchors, slots and masters."""

    def __init__(
        self,
        method: Method,
        adapter: EngineAdapter,
        state: StateStore,
        per_tensor: Sequence[ShardedTensors],
        num_clusters: Callable[[], int],
        deferral: Deferral,
        ladder: Ladder,
    ) -> None:
        self._method = method
        self._ladder = ladder
        self._deferral = deferral
        self._adapter = adapter
        self._state = state
        self._per_tensor = per_tensor
        self._num_clusters = num_clusters
        self._outer_update = OuterUpdate(
            adapter.fragments, state.allocator.work_space("work_space")
        )

    def take(self, arrival: Arrival, history: History) -> None:
        """Take the step that an arrival calls for; without a mean, only the merge."""
        step: Tensor | None = None
        if arrival.mean is not None and self._method.outer_optimizer.keeps_anchor:
            step = self._step_anchor(arrival, history)  # outer parameters: Alg. 1, line 13
        merged = self._merge(arrival, step, history)  # what training goes on from: Alg. 1, line 3
        self._write(arrival, merged)

    def read_unsent(self, fragments: Collection[int]) -> dict[int, Tensor]:
        """Return how far fragments have come since their last launches, `start - local`.

        Nothing where parameters keep that when what was launched is applied.
        """
        delay, unsent = self._method.delay, dict[int, Tensor]()
        is_replaced = delay.rounds_under_way and not delay.keeps_unsent
        for fragment in sorted(fragments) if is_replaced else ():
            local = torch.empty_like(self._state.scratch(fragment, "work"))
            self._adapter.read(fragment, local)
            slots = self._state.slots[fragment].delay
            unsent[fragment] = delay.contribution(local, self._state.anchor[fragment], slots)
        return unsent

    def begin_rounds(self, unsent: Mapping[int, Tensor]) -> None:
        """Start anew from the anchors, and go as far as `read_unsent` has said, used up."""
        for fragment, distance in unsent.items():
            anchor, slots = self._state.anchor[fragment], self._state.slots[fragment].delay
            self._method.delay.begin(anchor, slots)
            self._adapter.write(fragment, torch.sub(anchor, distance, out=distance))

    @timed("outer step")
    def _step_anchor(self, arrival: Arrival, history: History) -> Tensor:
        """Let the outer optimizer step the anchor with the weighed mean; return its step."""
        fragment, transfer, mean = arrival.fragment, arrival.transfer, arrival.mean
        assert isinstance(transfer, Transfer) and mean is not None
        slots, per_tensor = self._state.slots[fragment], self._per_tensor[fragment]
        mean = self._method.delay.gradient(mean, self._state.anchor[fragment], slots.delay)
        staleness, scratch = self._method.staleness, self._state.scratch(fragment, "work")
        sideband = transfer.buffers.sideband.averages  # used up, and another cluster may lack it
        if staleness.is_elementwise:
            sideband = self._state.scratch(fragment, "local").copy_(sideband)
        else:
            # as the mean: who writes the buffer next has waited for this copy
            sideband = sideband.to(mean.device, non_blocking=True, copy=True)
        gradient = staleness.weigh(
            mean, sideband, transfer.interval, slots.staleness, per_tensor, scratch
        )
        self._state.before_write(fragment)
        update = self._update(gradient, slots.outer, fragment, history, "outer")
        staleness.remember(update, slots.staleness, per_tensor)
        self._state.anchor[fragment].sub_(update)
        return update

    @timed("merge")
    def _merge(self, arrival: Arrival, step: Tensor | None, history: History) -> Tensor:
        """Return what the delay policy makes of the anchor and of what is local, `[numel]`."""
        fragment, transfer, delay = arrival.fragment, arrival.transfer, self._method.delay
        slots = self._state.slots[fragment].delay
        local: Tensor | None = None
        if delay.needs_local:
            local = self._state.scratch(fragment, "local")
            self._adapter.read(fragment, local)
        own = [t.buffers.kept for t in arrival.under_way if t.fragment == fragment]
        launched = transfer if isinstance(transfer, Transfer) else None
        age = history.step - launched.launched if launched else 0
        view = SyncView(
            mean=arrival.mean,
            anchor=self._state.anchor[fragment],
            step=step,
            local=local,
            kept=launched.buffers.kept if launched else None,
            own=[kept for kept in own if kept is not None],
            slots=slots,
            scratch=self._state.scratch(fragment, "work"),
            outer_update=lambda w: self._update(w, slots, fragment, history, "delay"),
            per_tensor=self._per_tensor[fragment],
            num_clusters=self._num_averaged(launched),
            age=age,
            interval=launched.interval if launched else 0,
            is_current=age <= 0 and not (launched and launched.was_sent_before_update),
            report=arrival.report,
        )
        return delay.merge(view)

    def _num_averaged(self, launched: Transfer | None) -> int:
        """Return who is behind what has come: what is under way counts on the same, not on who is
        there at this moment, which is another one in each cluster.
        """
        ids = launched.buffers.parity.ids if launched is not None else []
        return len(ids) or self._num_clusters()

    @timed("write")
    def _write(self, arrival: Arrival, merged: Tensor) -> None:
        """Hand the fragment back to the engine."""
        self._adapter.write(arrival.fragment, merged)

    def _update(
        self,
        gradient: Tensor,
        slots: Mapping[str, Tensor],
        fragment: int,
        history: History,
        owner: str,
    ) -> Tensor:
        """Let the outer rule move `slots`, in place of `gradient`."""
        of_left_boundary = self._deferral.inner_lr
        context = OuterContext(
            history.rounds[fragment],
            self._adapter.inner_lr() if of_left_boundary is None else of_left_boundary,
            self._state.scratch(fragment, "work"),
            self._per_tensor[fragment],
        )
        rule = self._ladder.outer_optimizer(history)
        return self._outer_update.of(rule, gradient, slots, context, fragment, owner)
