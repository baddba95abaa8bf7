"""The loop: at every inner step boundary, launch what is due, then apply what is ripe.

That order makes blocking, streaming, one-step-delayed and eager methods the same code: a blocking
method launches and applies at the same boundary, an overlapped one applies what it launched
earlier. Methods differ in the policies they are made of, never in a branch here.

    read -> contribution -> header, codes -> transport -> mean (-> staleness penalty)
         -> outer update -> anchor -> merge -> write

Every decision is taken from the step count and other values equal on every rank, never from "has
my transfer arrived"; one that is late at its due step is waited for. A rank that owns nothing of
a fragment takes the same decisions without sending anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsx.comm.stop_place import StopPlace
from dsx.core.engine import EngineAdapter
from dsx.core.recorder import UNTRACED, Recorder
from dsx.core.transport import Transport
from dsx.core.types import History
from dsx.method.method import Method
from dsx.outer.attempt import Attempts
from dsx.outer.deferral import Deferral
from dsx.outer.first_steps import FirstSteps
from dsx.outer.guard import Guard
from dsx.outer.launches import Launches
from dsx.outer.measurements import Measurements
from dsx.outer.notices import NoticeCarrier
from dsx.outer.outer_step import Arrival, OuterStep
from dsx.outer.overlap import Overlap
from dsx.outer.per_tensor import sharded_tensors
from dsx.outer.recovery import Recovery
from dsx.outer.resources import Resources
from dsx.outer.resuming import Resuming
from dsx.outer.start import Start
from dsx.outer.state import StateStore
from dsx.outer.transfer import NothingYet, Totals, Transfer, sync_event
from dsx.outer.whole_matrices import MatrixGather, plan_matrix_gathers
from dsx.outer.wire_parts import WireParts

Event = Mapping[str, Any]


class OuterLoop:
    """Drives one rank's share of a method over an engine and a transport."""

    def __init__(
        self,
        method: Method,
        adapter: EngineAdapter,
        transport: Transport,
        on_sync: Callable[[Event], None] | None = None,
        matrix_gathers: Sequence[MatrixGather] | None = None,
        trace: Recorder = UNTRACED,
        resources: Resources | None = None,
    ) -> None:
        fragments = adapter.fragments
        method.validate(num_fragments=len(fragments))
        self.method = method
        self.adapter = adapter
        self.transport = transport
        counts = [*map(len, adapter.fragment_parameters)]
        seat = transport.seat.of_shard(adapter.ranks.shard[0])
        self.matrix_gathers = matrix_gathers or plan_matrix_gathers(method, adapter)
        wire = [gather.wire for gather in self.matrix_gathers]
        self.state = StateStore(method, adapter, counts, wire, seat, resources)
        for buffers in (adapter.buffers, *(gather.memory for gather in self.matrix_gathers)):
            self.state.allocator.adopt("in_the_cluster", buffers)
        self.history = History(len(fragments), list(adapter.fragment_numel))
        self.in_flight: list[Transfer | NothingYet] = self._nothing_yet()
        self.totals = Totals()
        self.measurements = Measurements(method, adapter, seat.place)
        self.notices = NoticeCarrier(adapter.ranks)
        self.attempts = Attempts(
            method, self.state, transport, self.measurements, trace, self.notices
        )
        self.recovery = Recovery(method, adapter, transport, self.state, self.notices)
        self.guard = Guard(method, adapter, speaks=not seat.position)
        self._ladder = self.guard.ladder
        self.stop_place: StopPlace | None = None  # asked before ripe transfers are applied
        self.at_boundary: Callable[[], object] = lambda: None  # behind each that has been ended
        self.at_launch: Callable[[Transfer], object] = lambda transfer: None
        self.before_change: Callable[[], object] = lambda: None  # of what all clusters share
        self.beginning = Start(method, adapter, transport, self.state)
        parts = WireParts(method, adapter, self.matrix_gathers, self.state)
        self.launches = Launches(
            method, adapter, self.state, self.matrix_gathers, parts, self.recovery,
            self.measurements, self.attempts, trace,
        )  # fmt: skip
        self.last_applied: dict[int, Transfer] = {}  # by fragment
        self._resuming: Resuming | None = None
        self.deferral = Deferral(adapter)
        self._on_sync, self._trace = on_sync, trace
        self.overlap = Overlap(method, adapter.stage, self._ladder)
        self._complete: set[int] = set()  # whose gradients are done, in this inner step
        # no inner step since their launch; a first launch in the backward is in the first step
        self._idle = set[int]() if method.schedule.when else set(range(len(fragments)))
        per_tensor = sharded_tensors(adapter, self.state.scratch)
        self._first_steps = FirstSteps(method, adapter, self.state, per_tensor)
        self._outer_step = OuterStep(
            method, adapter, self.state, per_tensor, lambda: transport.seat.num_clusters,
            self.deferral, self._ladder, self.launches, parts,
        )  # fmt: skip

    def start(self, keeps_masters: bool = False, waits: bool = False) -> None:
        """Before training, take the first member's masters, or the own, as the first anchor.

        With `waits`: at `beginning.settle()`, if they differ, or never, if a checkpoint comes.
        """
        list(self.starting(keeps_masters, waits))

    def starting(self, keeps_masters: bool = False, waits: bool = False) -> Iterator[None]:
        """Start; clusters of one process take turns, as one may take another's masters."""
        yield from self.beginning.taking(keeps_masters, waits)
        self.method.schedule.advance(self.history, self._ladder.sync_params(self.history))
        if self.method.schedule.when is not None:
            self.adapter.watch_backward(self.launch_in_backward, self.method.schedule.when)

    def settle(self) -> None:
        """Take up again what was under way when this state was saved, once all clusters are here.

        Collective over a stage's ranks; done at the next boundary, if nobody asks before.
        """
        self.before_change()
        if self._resuming is not None:
            self._resuming.settle()
            self._resuming = None

    def after_inner_step(self, is_skipped: bool = False) -> bool:
        """Pass one boundary; return whether masters were written (the same on every rank).

        `is_skipped`: the inner optimizer did not take the step, on any rank of the cluster.
        """
        self.launch_due(is_skipped)
        return self.apply_ripe()

    @torch.no_grad()
    def launch_in_backward(self, fragment: int) -> None:
        """Launch a fragment that is due in this step; its gradients are complete.

        In the schedule's order, which is every cluster's: a fragment waits for those due before
        it, so clusters whose gradients complete in another order (or not at all) still meet.
        """
        self.deferral.require_none(self.history.step)
        started = time.perf_counter()
        self.settle()
        step = self.history.step + 1
        self._complete.add(fragment)
        for due in self._due(step):
            if self.history.launched[due] < step:
                if due not in self._complete:
                    break
                self._launch(due, step, is_in_backward=True)
        self.totals.blocked_seconds += time.perf_counter() - started

    @torch.no_grad()
    def launch_due(self, is_skipped: bool = False) -> None:
        """Advance the clock by one inner step and launch what the schedule says."""
        self.beginning.require_settled()
        self.deferral.require_none(self.history.step)
        started = time.perf_counter()
        self.settle()
        self.guard.settle(self.history)
        self.totals.skipped_steps += is_skipped
        self._idle = self._idle if is_skipped else set()
        self.measurements.begin_boundary(started)
        step = self.history.step + 1
        due = [p for p in self._due(step) if self.history.launched[p] < step]
        self.history.step = step
        self._complete.clear()
        self._first_steps.observe(self.history)
        for fragment in due:
            self._launch(fragment, step, shared_by=len(due))
        self.totals.blocked_seconds += time.perf_counter() - started

    @torch.no_grad()
    def apply_ripe(self, may_stop: bool = True) -> bool:
        """Wait for and apply every transfer whose time has come, in launch order.

        Where `stop_place` puts one off, it and those behind it stay under way: `end_boundary`
        applies them, in this process or in one that has loaded what is saved now.
        """
        started = time.perf_counter()
        ripe = self.overlap.ripe(self.in_flight, self.history.step)
        stop_place = self.stop_place if may_stop else None
        if not all(self._apply(transfer, stop_place) for transfer in ripe):
            self.deferral.begin(self.launches.send_due)  # the rest is for whoever goes on from here
            return True
        self.deferral.end()
        self._first_steps.keep(self.history)
        self.measurements.end_boundary(self.history)
        self.method.schedule.advance(self.history, self._ladder.sync_params(self.history))
        self.at_boundary()
        self.totals.blocked_seconds += time.perf_counter() - started
        return bool(ripe)

    def end_boundary(self) -> bool:
        """Apply what was left of the last boundary, before the next inner step.

        Returns whether masters were written, which `sync_model_weights` then brings to the model.
        """
        self.settle()
        return self.deferral.is_deferred and self.apply_ripe(may_stop=False)

    def drain(self) -> bool:
        """Apply everything in flight with its real age; return whether there was anything.

        Training may go on: rounds start anew from the anchors, and what was done since the last
        launches goes with the next. All call it at one step; `sync_model_weights` is due.
        """
        return bool(sum(1 for _ in self.draining()))

    @torch.no_grad()
    def draining(self) -> Iterator[Transfer]:
        """Drain; clusters of one process take turns after each transfer, as one may mend others."""
        self.end_boundary()
        self.before_change()
        pending = [t for t in self.in_flight if isinstance(t, Transfer)]
        unsent = self._outer_step.read_unsent({t.fragment for t in pending})
        for transfer in pending:
            started = time.perf_counter()
            self._apply(transfer)
            for fragment in self.recovery.restarts(transfer):
                unsent.pop(fragment, None)  # not finite, or from a wrong anchor: given up
            self.totals.blocked_seconds += time.perf_counter() - started
            yield transfer
        self._outer_step.begin_rounds(unsent)
        self._first_steps.keep(self.history)
        self.in_flight = self._nothing_yet()
        self.history.under_way = [0] * self.history.num_fragments

    def restore(
        self,
        history: History,
        in_flight: list[Transfer | NothingYet],
        last: Sequence[Transfer] = (),
        deferred: float | None = None,
        allows_unequal_steps: bool = False,
        has_trained: bool = True,
    ) -> None:
        """Go on from a checkpoint whose buffers have been copied into `state`; all clusters do.

        `last` have been applied, and others may lack them; `deferred` is the inner rate of a
        boundary that `end_boundary` has to end; without `has_trained` it is idle as of now.
        """
        self.history, self.in_flight = history, in_flight
        self.launches.forget()
        self.notices.begin_anew()
        self.beginning.is_open = False  # masters that differ have been loaded over
        self._idle = set[int]() if has_trained else set(range(history.num_fragments))
        self.last_applied = {transfer.fragment: transfer for transfer in last}
        self.deferral.inner_lr = deferred
        self._resuming = Resuming(
            self.adapter, self.state, self.attempts, self.transport, history, in_flight, last,
            self.guard, allows_unequal_steps,
        )  # fmt: skip

    def _due(self, step: int) -> list[int]:
        schedule, stage = self.method.schedule, self.adapter.stage
        return list(schedule.due(step, self.history, self._ladder.sync_params(self.history), stage))

    def _nothing_yet(self) -> list[Transfer | NothingYet]:
        rounds = self.method.delay.rounds_under_way
        return [NothingYet(f.id) for f in self.adapter.fragments for _ in range(rounds)]

    def _launch(
        self, fragment: int, step: int, is_in_backward: bool = False, shared_by: int = 1
    ) -> None:
        params = self._ladder.sync_params(self.history)
        sync_params = self.overlap.sync_params(fragment, params, self.history, shared_by)
        transfer = self.launches.make(
            fragment, step, self.history, sync_params, fragment in self._idle, self.in_flight
        )
        self._idle.add(fragment)
        transfer.shared_by = shared_by
        transfer.was_sent_before_update = is_in_backward and self.method.schedule.when == "before"
        self.history.launched[fragment] = step
        self.history.launches[fragment] += 1
        self.history.under_way[fragment] += 1
        self.in_flight.append(transfer)
        self.at_launch(transfer)

    def _apply(self, transfer: Transfer | NothingYet, place: StopPlace | None = None) -> bool:
        """Take in what has come, and the outer step with it; False if the cluster stops before."""
        timer = self._trace.span_timer("apply", transfer.fragment, self.history.step)
        wait_seconds = -time.perf_counter()
        pending = transfer.pending if isinstance(transfer, Transfer) else None
        if place and pending and self.deferral.puts_off(place.may_receive(pending)):
            return False
        self.in_flight.remove(transfer)
        under_way = [t for t in self.in_flight if isinstance(t, Transfer)]
        arrival = Arrival(transfer, None, under_way, {}, timer)
        if isinstance(transfer, Transfer):
            wait_seconds += self._receive(transfer, arrival)
        if restarts := self.recovery.restarts(transfer):
            self.recovery.restart(restarts, under_way)
        else:
            self._outer_step.take(arrival, self.history)
        self.history.under_way[transfer.fragment] -= 1
        if isinstance(transfer, Transfer):
            transfer.buffers.is_free = True
            self.last_applied[transfer.fragment] = transfer
            self.history.applied[transfer.fragment] = self.history.step
            self._account(transfer, wait_seconds, arrival.report)
            timer.end(launched=transfer.launched, bytes=transfer.pending.bytes_sent)
        return True

    def _receive(self, transfer: Transfer, arrival: Arrival) -> float:
        """Wait for a mean and check it, into `arrival`; return until when it was waited for."""
        fragment, mean = transfer.fragment, transfer.pending.wait()
        attempt, parity = transfer.attempt, transfer.buffers.parity
        waited_until = time.perf_counter()
        arrival.timer.mark("wait", "wait")
        places = self.transport.seat.membership.places
        told = attempt.notes or transfer.pending.notes
        self.guard.look(fragment, mean, parity, places)
        self.recovery.act_on(fragment, transfer.launched, parity, self.history, notes=told)
        self.notices.places.hear(attempt.what.number, places, parity, sum(self.history.launches))
        self.recovery.count_idle(transfer, self.history)
        if (norm := transfer.buffers.mean_norm) is not None or parity.is_refused:  # else later
            arrival.report["mean_norm"] = torch.linalg.vector_norm(mean) if norm is None else norm
        seconds = transfer.pending.seconds / transfer.shared_by
        self.measurements.take(
            transfer.buffers.sideband, fragment, self.history, seconds, transfer.sync_params,
            parity.is_refused,
        )  # fmt: skip
        arrival.report |= self.guard.take(fragment, attempt.round, parity, places, self.history)
        arrival.timer.mark("check")
        if parity.is_refused:
            self.totals.refused += 1
            self.attempts.take_back(attempt)
        else:
            self.history.rounds[fragment] += 1
            self.history.intervals[fragment], arrival.mean = transfer.interval, mean
        return waited_until

    def _account(self, transfer: Transfer, wait_seconds: float, report: dict[str, Tensor]) -> None:
        self.totals.add(transfer, wait_seconds)
        if self._on_sync is not None:
            numel = self.adapter.fragments[transfer.fragment].numel
            self._on_sync(sync_event(transfer, self.history, numel, wait_seconds, report))
