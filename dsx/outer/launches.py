"""A launch: what a fragment sends is made of the masters, and the first attempt is started.

    read -> contribution -> copy to the host (-> codes) -> an attempt, on the transfer's thread

The training thread goes on at once, but where a policy needs the codes before the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsx.compress.base import Launch
from dsx.core.engine import EngineAdapter
from dsx.core.recorder import Recorder
from dsx.core.transport import Submission
from dsx.core.types import History, SyncParams
from dsx.method.in_one_pass import difference_
from dsx.method.method import Method
from dsx.outer.arenas import TransferBuffers
from dsx.outer.attempt import Attempt, Attempts
from dsx.outer.host_copy import HostCopies
from dsx.outer.measurements import Measurements
from dsx.outer.parts import parts_of
from dsx.outer.recovery import Recovery
from dsx.outer.state import StateStore
from dsx.outer.transfer import Transfer
from dsx.outer.whole_matrices import MatrixGather


class Launches:
    """Makes one rank's launches."""

    def __init__(
        self,
        method: Method,
        adapter: EngineAdapter,
        state: StateStore,
        matrix_gathers: Sequence[MatrixGather],
        recovery: Recovery,
        measurements: Measurements,
        attempts: Attempts,
        trace: Recorder,
    ) -> None:
        self._method = method
        self._adapter = adapter
        self._state = state
        self._recovery = recovery
        self._measurements = measurements
        self._attempts = attempts
        self._places = attempts.places
        self._trace = trace
        self.host_copies = HostCopies(method, adapter, matrix_gathers, state.device)

    def make(
        self, fragment: int, step: int, history: History, sync_params: SyncParams, is_idle: bool
    ) -> Transfer:
        """Launch a fragment at a step, from its masters as they are; `history` is of before.

        `is_idle`: the cluster has taken no inner step since the launch before.
        """
        timer = self._trace.span_timer("launch", fragment, step)
        state = self._state
        slots = state.slots[fragment]
        buffers = state.take_buffers(fragment, history.launches[fragment] + 1)
        contribution = self._contribute(fragment, buffers)
        is_coded_here = self._method.encodes_at_launch
        sideband = self._method.staleness.sideband(slots.staleness)
        # before the copy, whose event then says that the hash is there, too
        anchor = self._recovery.hash_anchor(fragment, history.launches[fragment])
        timer.mark("contribution")
        host_copy = self.host_copies.start(fragment, contribution, sideband, buffers, anchor)
        timer.mark("copy")
        is_before_update = self._method.schedule.when == "before" and history.step < step
        attempt = Attempt(
            Submission(fragment, step, number=sum(history.launches) + 1),
            Launch(buffers.round, sync_params.rank),
            buffers,
            host_copy.is_finite,
            is_idle,
            host_copy.anchor,
            self._places.to_say(is_before_update),
        )
        if state.is_sent(fragment):
            attempt.is_coded = not is_coded_here
            if self._method.waits_for_codes:
                self._attempts.require_coded(attempt)
                timer.mark("encode")
            self._measurements.post(buffers.posted, fragment, history)
        pending = self._attempts.submit(attempt, sync_params)
        interval = step - history.launched[fragment]
        timer.end(launched=step)
        return Transfer(fragment, step, interval, pending, attempt, host_copy.norm, sync_params)

    def _contribute(self, fragment: int, buffers: TransferBuffers) -> Tensor:
        """Return what a launch sends, `[numel]`: in the memory it is sent from, where it can be."""
        delay, state, kept = self._method.delay, self._state, buffers.kept
        keeps = None if kept is None else delay.keeps
        if keeps == "contribution" and self._method.encodes_at_launch:
            keeps = None  # what others decode is, once there are codes
        made = self.host_copies.place(fragment, buffers)
        contribution = state.outgoing(fragment) if made is None else made
        anchor, slots = state.anchor[fragment], state.slots[fragment].delay
        for part in parts_of(contribution.numel(), state.device, self._method):
            local = part.of(contribution)
            live = self._adapter.in_a_row(fragment, part.start, part.stop)
            if live is None or not delay.is_difference:
                self._adapter.read(fragment, local, part.start)
                live = local
            if kept is not None and keeps == "local":
                part.of(kept).copy_(live)
            if live is not local:
                origin = delay.origin(part.of(anchor), part.of_each(slots))
                difference_(origin, live, local)
            else:
                sent = delay.contribution(local, part.of(anchor), part.of_each(slots))
                if sent is not local:
                    local.copy_(sent)
            if kept is not None and keeps == "contribution":
                part.of(kept).copy_(local)
        return contribution
