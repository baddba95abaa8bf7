"""The outer step of one fragment: the papers' steps, in their order.

Over the flat fp32 vectors of DiLoCo's Alg. 1 (arXiv:2311.08105), lines 11 to 13: the mean of all
clusters' pseudo-gradients, weighed by CO2's staleness penalty where the method has one
(arXiv:2401.16265), steps the anchor, and the delay policy says what training goes on from: the
anchor (DiLoCo), a mix of it with the local parameters (Streaming DiLoCo, arXiv:2501.18512), a
compensated anchor (CoCoDC, arXiv:2504.17672), or an eager one. Nothing here waits, decides or
communicates between clusters. All of it is done to one part of a fragment after another (parts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsx.core.engine import EngineAdapter
from dsx.core.recorder import SpanTimer
from dsx.core.types import History, SyncView
from dsx.method.ladder import Ladder
from dsx.method.method import Method
from dsx.method.outer_optimizer import OuterContext, OuterOptimizer
from dsx.outer.deferral import Deferral
from dsx.outer.launches import Launches
from dsx.outer.outer_update import OuterUpdate
from dsx.outer.parts import Part, joined
from dsx.outer.per_tensor import ShardedTensors
from dsx.outer.state import StateStore
from dsx.outer.transfer import NothingYet, Transfer
from dsx.outer.wire_parts import WirePart, WireParts
from dsx.outer.work_space import says


@dataclass
class Arrival:
    """A transfer that has come, with its mean as it travels; None if it was empty or is refused.

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
        due: Launches,
        parts: WireParts,
    ) -> None:
        self._method = method
        self._ladder = ladder
        self._deferral = deferral
        self._due = due
        self._parts = parts
        self._adapter = adapter
        self._state = state
        self._per_tensor = per_tensor
        self._num_clusters = num_clusters
        self._outer_update = OuterUpdate(
            adapter.fragments, state.allocator.work_space("work_space")
        )

    def take(self, arrival: Arrival, history: History) -> None:
        """Take the step that an arrival calls for; without a mean, only the merge."""
        fragment, rule = arrival.fragment, self._ladder.outer_optimizer(history)
        takes_step = arrival.mean is not None and self._method.outer_optimizer.keeps_anchor
        if takes_step:
            self._state.before_write(fragment)
        stays = takes_step and self._stays(rule)
        reports: list[dict[str, Tensor]] = []
        next_sent = self._due.applying(arrival.transfer)
        for on_wire in self._parts.of(fragment, arrival.mean, next_sent, rule):
            reports.append({})
            part = on_wire.part
            sent = None if next_sent is None else self._contribute(fragment, part)
            mean, out = self._mean_of(on_wire, stays)
            if mean is not None and "mean_norm" not in arrival.report:
                reports[-1]["mean_norm"] = torch.linalg.vector_norm(mean)
            step: Tensor | None = None
            if takes_step:  # outer parameters: Alg. 1, line 13
                step = self._step_anchor(arrival, part, mean, out, history)
                mean = step if out is not None else mean
            self._merge(arrival, part, mean, step, history, reports[-1])
            if on_wire.sent is not None and sent is not None:  # the mean may lie there: it is used
                on_wire.sent.copy_(sent)
        self._adapter.end_write(fragment)
        self._due.send(fragment)
        arrival.report |= joined(reports)
        arrival.timer.mark("outer step")

    def read_unsent(self, fragments: Collection[int]) -> dict[int, Tensor]:
        """Return how far fragments have come since their last launches, `start - local`.

        Nothing where parameters keep that when what was launched is applied.
        """
        delay, unsent = self._method.delay, dict[int, Tensor]()
        is_replaced = delay.rounds_under_way and not delay.keeps_unsent
        for fragment in sorted(fragments) if is_replaced else ():
            numel = self._adapter.fragments[fragment].numel
            local = torch.empty(numel, device=self._state.device)
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

    def _contribute(self, fragment: int, part: Part) -> Tensor:
        """Return what the next launch sends of a part that is about to change, in work space."""
        place = self._work(part, "next")
        return self._due.contributions.make(fragment, part, place)

    def _mean_of(self, there: WirePart, stays: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return what has come of a part, and work space for its step if it `stays` as it is; else
        it is in work space itself.
        """
        if there.mean is None or there.is_in_work_space:
            return there.mean, None
        work = self._work(there.part, "mean")
        if stays:
            return there.mean, work
        return work.copy_(there.mean), None

    def _stays(self, rule: OuterOptimizer) -> bool:
        """Whether a mean is given to the outer rule as it has come, and left so."""
        is_as_it_came = self._method.delay.steps_with_mean
        return (
            is_as_it_came and says(rule, "leaves_gradient") and self._method.staleness.leaves_mean
        )

    def _step_anchor(
        self,
        arrival: Arrival,
        part: Part,
        mean: Tensor | None,
        out: Tensor | None,
        history: History,
    ) -> Tensor:
        """Let the outer optimizer step the anchor with the weighed mean; return its step, which is
        in `out`, or in place of the mean.
        """
        fragment, transfer = arrival.fragment, arrival.transfer
        assert isinstance(transfer, Transfer) and mean is not None
        slots, per_tensor = self._state.slots[fragment], self._per_tensor[fragment]
        anchor = part.of(self._state.anchor[fragment])
        mean = self._method.delay.gradient(mean, anchor, part.of_each(slots.delay))
        staleness, scratch = self._method.staleness, self._work(part, "work")
        # used up, and another cluster may lack it; copied as the mean is: who writes there next has
        # waited for that
        sideband = transfer.buffers.sideband.averages
        if staleness.is_elementwise:
            there = self._state.scratch("local", sideband.numel())
            sideband = there.copy_(sideband, non_blocking=True)
        elif sideband.numel():
            sideband = sideband.to(mean.device, non_blocking=True, copy=True)
        gradient = staleness.weigh(
            mean, sideband, transfer.interval, slots.staleness, per_tensor, scratch
        )
        own = part.of_each(slots.outer)
        update = self._update(gradient, own, fragment, part, history, "outer", out)
        staleness.remember(update, slots.staleness, per_tensor)
        anchor.sub_(update)
        return update

    def _merge(
        self,
        arrival: Arrival,
        part: Part,
        mean: Tensor | None,
        step: Tensor | None,
        history: History,
        report: dict[str, Tensor],
    ) -> None:
        """Make of the masters what the delay policy makes of the anchor and of what is local."""
        fragment, transfer, delay = arrival.fragment, arrival.transfer, self._method.delay
        slots = part.of_each(self._state.slots[fragment].delay)
        live = self._adapter.in_a_row(fragment, part.start, part.stop)
        local: Tensor | None = None
        if delay.needs_local:
            local = live
            if local is None:
                local = self._work(part, "local")
                self._adapter.read(fragment, local, part.start)
        own = [t.buffers.kept for t in arrival.under_way if t.fragment == fragment]
        launched = transfer if isinstance(transfer, Transfer) else None
        kept = launched.buffers.kept if launched else None
        age = history.step - launched.launched if launched else 0
        view = SyncView(
            mean=mean,
            anchor=part.of(self._state.anchor[fragment]),
            step=step,
            local=local,
            kept=None if kept is None else part.of(kept),
            own=[part.of(kept) for kept in own if kept is not None],
            slots=slots,
            scratch=self._work(part, "work"),
            outer_update=lambda w: self._update(w, slots, fragment, part, history, "delay"),
            per_tensor=self._per_tensor[fragment],
            num_clusters=self._num_averaged(launched),
            age=age,
            interval=launched.interval if launched else 0,
            is_current=age <= 0 and not (launched and launched.was_sent_before_update),
            report=report,
        )
        merged = delay.merge(view)
        if live is None:
            self._adapter.write_part(fragment, merged, part.start)
        elif merged is not live:
            live.copy_(merged)

    def _num_averaged(self, launched: Transfer | None) -> int:
        """Return who is behind what has come: what is under way counts on the same, not on who is
        there at this moment, which is another one in each cluster.
        """
        ids = launched.buffers.parity.ids if launched is not None else []
        return len(ids) or self._num_clusters()

    def _work(self, part: Part, purpose: str) -> Tensor:
        """Return work space as long as a part: the same for every one, so it stays at hand."""
        return self._state.scratch(purpose, part.numel)

    def _update(
        self,
        gradient: Tensor,
        slots: Mapping[str, Tensor],
        fragment: int,
        part: Part,
        history: History,
        owner: str,
        out: Tensor | None = None,
    ) -> Tensor:
        """Let the outer rule move a part's `slots`; in `out`, or in place of `gradient`."""
        of_left_boundary = self._deferral.inner_lr
        context = OuterContext(
            history.rounds[fragment],
            self._adapter.inner_lr() if of_left_boundary is None else of_left_boundary,
            self._work(part, "work"),
            self._per_tensor[fragment],
            out,
        )
        rule = self._ladder.outer_optimizer(history)
        return self._outer_update.of(rule, gradient, slots, context, (fragment, part.start), owner)
