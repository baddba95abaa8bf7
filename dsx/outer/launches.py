"""A launch: what a fragment sends is made of the masters, and the first attempt is started.

    read -> contribution -> copy to the host (-> codes) -> an attempt, on the transfer's thread

The training thread goes on at once, but where a policy needs the codes before the mean. What takes
the memory of a mean is made as that is applied, at the same boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.compress.base import Launch
from dsx.core.engine import EngineAdapter
from dsx.core.recorder import Recorder
from dsx.core.transport import Submission
from dsx.core.types import History, SyncParams
from dsx.method.method import Method
from dsx.outer.arenas import TransferBuffers
from dsx.outer.attempt import Attempt, Attempts
from dsx.outer.contribution import Contributions
from dsx.outer.host_copy import HostCopies
from dsx.outer.measurements import Measurements
from dsx.outer.parts import parts_of
from dsx.outer.recovery import Recovery
from dsx.outer.state import StateStore
from dsx.outer.transfer import NothingYet, NotSent, Transfer
from dsx.outer.whole_matrices import MatrixGather
from dsx.outer.wire_parts import WireParts


class Launches:
    """Makes one rank's launches.

    One whose contribution takes the memory of the mean applied behind it (passing_on.py) is due
    until that is `applying`, and `send` starts its exchange.
    """

    def __init__(
        self,
        method: Method,
        adapter: EngineAdapter,
        state: StateStore,
        matrix_gathers: Sequence[MatrixGather],
        parts: WireParts,
        recovery: Recovery,
        measurements: Measurements,
        attempts: Attempts,
        trace: Recorder,
    ) -> None:
        self._method = method
        self._state = state
        self._recovery = recovery
        self._measurements = measurements
        self._attempts = attempts
        self._places = attempts.places
        self._trace = trace
        self._parts = parts
        self._due: dict[int, Transfer] = {}  # by fragment: launched, and not sent
        self._made: dict[int, Tensor | None] = {}  # of those: what is being made, None if copied
        self.contributions = Contributions(method, adapter, state)
        self.host_copies = HostCopies(method, adapter, matrix_gathers, state.device)
        recovery.before_restart = self.send_due

    def make(
        self,
        fragment: int,
        step: int,
        history: History,
        sync_params: SyncParams,
        is_idle: bool,
        under_way: Sequence[Transfer | NothingYet] = (),
    ) -> Transfer:
        """Launch a fragment at a step, from its masters as they are; `history` is of before.

        `is_idle`: the cluster has taken no inner step since the launch before. `under_way` are
        transfers launched before: the mean of one may be applied at this boundary.
        """
        timer = self._trace.span_timer("launch", fragment, step)
        state, is_due = self._state, self._takes_a_mean(fragment, under_way)
        buffers = state.take_buffers(fragment, history.launches[fragment] + 1, not is_due)
        contribution = None if is_due else self._contribute(fragment, buffers)
        sideband = self._method.staleness.sideband(state.slots[fragment].staleness)
        if is_due:  # what it tells is of before the mean is applied, too
            sideband = buffers.posted.averages.copy_(sideband)
        # before the copy, whose event then says that the hash is there, too
        anchor = self._recovery.hash_anchor(fragment, history.launches[fragment])
        timer.mark("contribution")
        is_before_update = self._method.schedule.when == "before" and history.step < step
        what = Submission(fragment, step, number=sum(history.launches) + 1)
        attempt = Attempt(
            what,
            Launch(buffers.round, sync_params.rank),
            buffers,
            lambda: self._look(fragment),
            is_idle,
            anchor,
            self._places.to_say(is_before_update),
        )
        interval = step - history.launched[fragment]
        norm = torch.zeros(())
        transfer = Transfer(fragment, step, interval, NotSent(what), attempt, norm, sync_params)
        if contribution is not None:
            self._copy(transfer, contribution, sideband)
            timer.mark("copy")
        if state.is_sent(fragment):
            attempt.is_coded = not self._method.encodes_at_launch
            if self._method.waits_for_codes:
                self._attempts.require_coded(attempt)
                timer.mark("encode")
            self._measurements.post(buffers.posted, fragment, history)
        if is_due:
            self._due[fragment] = transfer
        else:
            transfer.pending = self._attempts.submit(attempt, sync_params)
        timer.end(launched=step)
        return transfer

    def applying(self, transfer: Transfer | NothingYet) -> Tensor | None:
        """Return where the contribution of a launch that is due is to be made, as it travels, as
        the mean of a transfer of the fragment is applied and used up there; None if none is due,
        or it has been made.
        """
        fragment = transfer.fragment
        due = self._due.get(fragment)
        if due is None or fragment in self._made or not isinstance(transfer, Transfer):
            return None
        transfer.buffers.pass_on(due.buffers)
        made = self._made[fragment] = due.buffers.sent
        return made

    def send(self, fragment: int) -> None:
        """Send what was due of a fragment, made by now; behind the outer step."""
        due = self._due.pop(fragment, None)
        if due is not None:
            made = self._made.pop(fragment)
            if made is not None:
                self._copy_due(due, made)
            due.pending = self._attempts.submit(due.attempt, due.sync_params)

    def send_due(self) -> None:
        """Make and send all that is due: masters or anchors are about to be replaced."""
        self.make_due()
        for fragment in [*self._due]:
            self.send(fragment)

    def make_due(self) -> None:
        """Make the contributions that are due, in memory of their own: a checkpoint is to have them
        though what is ripe has not been applied.
        """
        for fragment, due in self._due.items():
            if fragment not in self._made:
                due.buffers.lend()
                self._copy_due(due, self._contribute(fragment, due.buffers))
                self._made[fragment] = None

    def forget(self) -> None:
        """Forget what was due: training goes on from elsewhere."""
        self._due.clear()
        self._made.clear()

    def _takes_a_mean(self, fragment: int, under_way: Sequence[Transfer | NothingYet]) -> bool:
        """Whether a mean of the fragment is applied at this boundary: the same on every rank."""
        if not self._state.passes_on:
            return False
        own = [transfer for transfer in under_way if transfer.fragment == fragment]
        is_full = len(own) == self._method.delay.rounds_under_way
        return is_full and isinstance(own[0], Transfer)

    def _look(self, fragment: int) -> bool:
        """Make what is due for who asks before it is applied, and return whether it is finite."""
        self.make_due()
        return self._due[fragment].attempt.is_finite()

    def _copy_due(self, transfer: Transfer, contribution: Tensor) -> None:
        self._copy(transfer, contribution, transfer.buffers.posted.averages)

    def _copy(self, transfer: Transfer, contribution: Tensor, sideband: Tensor) -> None:
        """Start bringing a contribution and its sideband to the host."""
        fragment, attempt = transfer.fragment, transfer.attempt
        copy = self.host_copies.start(
            fragment, contribution, sideband, attempt.buffers, attempt.anchor
        )
        attempt.is_finite, attempt.anchor = copy.is_finite, copy.anchor
        transfer.contribution_norm = copy.norm

    def _contribute(self, fragment: int, buffers: TransferBuffers) -> Tensor:
        """Return what a launch sends: where it is sent from, or `[numel]` on an accelerator."""
        device, kept = self._state.device, buffers.kept
        if device.type != "cuda":
            for there in self._parts.of(fragment, None, buffers.sent):
                assert there.sent is not None
                self.contributions.make(fragment, there.part, there.sent, kept)
            return buffers.sent
        # new every time: the copy to the host may still read the one before
        contribution = torch.empty(self._state.numel(fragment), device=device)
        for part in parts_of(contribution.numel(), device, self._method):
            self.contributions.make(fragment, part, part.of(contribution), kept)
        return contribution
