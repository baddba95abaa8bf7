"""The loop: at every inner step boundary, launch what is due, then apply what is ripe.

That order makes blocking, streaming and one-step-delayed methods the same code (algorithms of
DiLoCo, arXiv:2311.08105 and Streaming DiLoCo, arXiv:2501.18512, Alg. 1-2): a blocking method
launches and applies at the same boundary, an overlapped one applies what it launched earlier.

    read -> contribution (anchor - local) -> compressor -> transport -> mean
         -> outer_grad -> outer optimizer -> merge -> write

Rules that keep clusters together: every decision is taken from the step count and other values
equal on every rank, never from "has my transfer arrived"; a transfer that is late at its due
step is waited for. A rank that owns nothing of a fragment takes the same decisions without
sending anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsx.backends.base import Backend
from dsx.comm.base import Pending, Submission, Transport
from dsx.method import Method
from dsx.outer_optimizer import OuterContext
from dsx.state import StateStore
from dsx.types import History, SyncView

Event = Mapping[str, Any]


@dataclass
class Transfer:
    """One fragment under way: who launched it when, and the handle to wait on."""

    fragment: int
    launched: int
    pending: Pending
    pseudo_gradient_norm: Tensor


@dataclass
class Totals:
    """Running sums of this rank since the loop started; seconds are the training thread's.

    `blocked_seconds` is all time spent in the loop, `wait_seconds` the part of it spent waiting
    for other clusters. Bytes are counted from the buffers handed to the network.
    """

    bytes_sent: int = 0
    wait_seconds: float = 0.0
    blocked_seconds: float = 0.0
    syncs: int = 0


class Arrived:
    """A transfer that has ended: restored from a checkpoint, or empty on this rank."""

    def __init__(self, mean: Tensor, bytes_sent: int = 0, seconds: float = 0.0) -> None:
        self._mean = mean
        self.bytes_sent = bytes_sent
        self.seconds = seconds

    def wait(self) -> Tensor:
        """Return the mean at once."""
        return self._mean


class OuterLoop:
    """Drives one rank's share of a method over a backend and a transport."""

    def __init__(
        self,
        method: Method,
        backend: Backend,
        transport: Transport,
        on_sync: Callable[[Event], None] | None = None,
    ) -> None:
        method.validate()
        self.method = method
        self.backend = backend
        self.transport = transport
        self.state = StateStore(backend.fragments, method.outer_optimizer.slots, backend.device)
        self.history = History(len(backend.fragments))
        self.in_flight: list[Transfer] = []
        self.totals = Totals()
        self._on_sync = on_sync

    @torch.no_grad()
    def start(self) -> None:
        """Take cluster 0's masters everywhere as the first anchor. Once, before training."""
        for fragment in self.backend.fragments:
            anchor = self.state.anchor[fragment.id]
            if fragment.numel:
                self.backend.read(fragment.id, anchor)
                wire = self.state.wire(fragment.id).copy_(anchor)
                self.transport.broadcast(fragment.id, wire)
                self.backend.write(fragment.id, anchor.copy_(wire))
        self.backend.publish()

    def after_inner_step(self) -> bool:
        """Pass one boundary; return whether masters were written (the same on every rank)."""
        self.launch_due()
        return self.apply_ripe()

    @torch.no_grad()
    def launch_due(self) -> None:
        """Advance the clock by one inner step and launch what the schedule says."""
        started = time.perf_counter()
        self.history.step += 1
        knobs = self.method.control.knobs(self.method.knobs, self.history)
        for fragment in self.method.schedule.due(self.history, knobs):
            self._launch(fragment)
        self.totals.blocked_seconds += time.perf_counter() - started

    @torch.no_grad()
    def apply_ripe(self) -> bool:
        """Wait for and apply every transfer whose time has come, in launch order."""
        started = time.perf_counter()
        ripe = [t for t in self.in_flight if self._is_ripe(t)]
        for transfer in ripe:
            self._apply(transfer)
        self.totals.blocked_seconds += time.perf_counter() - started
        return bool(ripe)

    @torch.no_grad()
    def drain(self) -> bool:
        """Apply everything in flight with its real age; return whether there was anything.

        Every cluster calls it at the same step; masters then need publishing.
        """
        started = time.perf_counter()
        pending = list(self.in_flight)
        for transfer in pending:
            self._apply(transfer)
        self.totals.blocked_seconds += time.perf_counter() - started
        return bool(pending)

    @contextmanager
    def exported(self) -> Generator[None, None, None]:
        """Hold the model a finished run hands out in the masters, published; restore on exit.

        The anchor or the mean of the clusters' parameters, as the delay policy says. Collective
        over all ranks of all clusters; allocates a copy of this rank's masters.
        """
        with torch.no_grad():
            kept = [self._read_copy(f.id) for f in self.backend.fragments]
            for fragment, local in zip(self.backend.fragments, kept, strict=True):
                self.backend.write(fragment.id, self._export(fragment.id, local))
            self.backend.publish()
        try:
            yield
        finally:
            with torch.no_grad():
                for fragment, local in zip(self.backend.fragments, kept, strict=True):
                    self.backend.write(fragment.id, local)
                self.backend.publish()

    def restore(self, history: History, in_flight: list[Transfer]) -> None:
        """Go on from a checkpoint whose buffers have been copied into `state`."""
        self.history = history
        self.in_flight = in_flight

    def _launch(self, fragment: int) -> None:
        step = self.history.step
        local = self.state.scratch(fragment, 0)
        self.backend.read(fragment, local)
        contribution = torch.sub(self.state.anchor[fragment], local, out=local)
        norm = torch.linalg.vector_norm(contribution)
        wire = self.state.wire(fragment).copy_(contribution)
        pending = self._submit(Submission(fragment, step), wire)
        self.history.launched[fragment] = step
        self.in_flight.append(Transfer(fragment, step, pending, norm))

    def _submit(self, what: Submission, wire: Tensor) -> Pending:
        if not wire.numel():
            return Arrived(wire)
        return self.transport.submit(what, self.method.compressor.exchange(wire))

    def _is_ripe(self, transfer: Transfer) -> bool:
        newer = sum(
            t.fragment == transfer.fragment and t.launched > transfer.launched
            for t in self.in_flight
        )
        return self.method.delay.is_ripe(self.history.step - transfer.launched, newer)

    def _apply(self, transfer: Transfer) -> None:
        fragment, delay = transfer.fragment, self.method.delay
        waited = time.perf_counter()
        mean_on_wire = transfer.pending.wait()
        wait_seconds = time.perf_counter() - waited
        self.in_flight.remove(transfer)

        anchor = self.state.anchor[fragment]
        mean = self.state.scratch(fragment, 0).copy_(mean_on_wire)
        scratch = self.state.scratch(fragment, 1)
        mean_norm = torch.linalg.vector_norm(mean)
        self.history.rounds[fragment] += 1
        age = self.history.step - transfer.launched
        view = SyncView(mean, anchor, None, scratch, self.transport.num_clusters, age)
        context = OuterContext(self.history.rounds[fragment], self.backend.inner_lr(), scratch)
        self.method.outer_optimizer.step(
            anchor, delay.outer_grad(view), self.state.slots[fragment], context
        )
        if delay.needs_local:
            view.local = mean  # used up by the outer step: its memory now holds the parameters
            self.backend.read(fragment, view.local)
        self.backend.write(fragment, delay.merge(view))
        self.history.applied[fragment] = self.history.step
        self._account(transfer, wait_seconds, mean_norm)

    def _account(self, transfer: Transfer, wait_seconds: float, mean_norm: Tensor) -> None:
        self.totals.bytes_sent += transfer.pending.bytes_sent
        self.totals.wait_seconds += wait_seconds
        self.totals.syncs += 1
        if self._on_sync is None:
            return
        self._on_sync(
            {
                "fragment": transfer.fragment,
                "numel": self.backend.fragments[transfer.fragment].numel,
                "round": self.history.rounds[transfer.fragment],
                "launched_step": transfer.launched,
                "applied_step": self.history.step,
                "bytes_sent": transfer.pending.bytes_sent,
                "wait_seconds": wait_seconds,
                "transfer_seconds": transfer.pending.seconds,
                "pseudo_gradient_norm": transfer.pseudo_gradient_norm,
                "mean_norm": mean_norm,
            }
        )

    def _read_copy(self, fragment: int) -> Tensor:
        local = torch.empty_like(self.state.anchor[fragment])
        self.backend.read(fragment, local)
        return local

    def _export(self, fragment: int, local: Tensor) -> Tensor:
        if self.method.delay.export == "anchor":
            return self.state.anchor[fragment]
        wire = local.to("cpu", copy=True)
        pending = self._submit(Submission(fragment, self.history.step, is_export=True), wire)
        mean = pending.wait()
        self.totals.bytes_sent += pending.bytes_sent
        return mean.to(local.device)
