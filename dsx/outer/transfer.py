"""One fragment under way: when it was launched, the handle to wait on, and its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dsx.core.transport import Pending, Submission
from dsx.core.types import History, SyncParams
from dsx.outer.arenas import TransferBuffers

if TYPE_CHECKING:
    from dsx.outer.attempt import Attempt


@dataclass
class Transfer:
    """A launched fragment; `interval` is the inner steps from the launch before to this one.

    `was_sent_before_update`: the parameters it carries are from before that step's inner update.
    `shared_by`: the fragments launched at the same boundary, which share the link. `sync_params`:
    what was in force at the launch. `pending` is of the `attempt`.
    """

    fragment: int
    launched: int
    interval: int
    pending: Pending
    attempt: Attempt
    contribution_norm: Tensor
    sync_params: SyncParams
    was_sent_before_update: bool = False
    shared_by: int = 1

    @property
    def buffers(self) -> TransferBuffers:
        """What is sent, and what comes back."""
        return self.attempt.buffers


@dataclass
class NothingYet:
    """The empty transfer a next-sync policy starts with: no outer step, only a merge."""

    fragment: int


class NotSent(Pending):
    """A launch of which nothing is sent yet: what it sends is made as a mean is applied."""

    def __init__(self, what: Submission) -> None:
        self._what = what

    def wait(self) -> Tensor:
        """Raise RuntimeError: nobody waits for it in the boundary of its launch."""
        raise RuntimeError(f"{self._what}: not sent yet, as the mean before it was not applied")

    @property
    def has_arrived(self) -> bool:
        """Never."""
        return False


class Arrived(Pending):
    """A transfer that has ended: restored from a checkpoint, or empty on this rank."""

    def __init__(self, mean: Tensor, bytes_sent: int = 0, seconds: float = 0.0) -> None:
        self._mean = mean
        self.bytes_sent = bytes_sent
        self.seconds = seconds

    def wait(self) -> Tensor:
        """Return the mean at once."""
        return self._mean

    @property
    def has_arrived(self) -> bool:
        """Always."""
        return True


@dataclass
class Totals:
    """Running sums of this rank since the loop started; seconds are the training thread's.

    `blocked_seconds` is all time spent in the loop, `wait_seconds` the part of it spent waiting
    for other clusters, `refused` the rounds left out because of a NaN, `skipped_steps` the inner
    steps that the optimizer did not take. Bytes are counted from the buffers handed to the network.
    """

    bytes_sent: int = 0
    wait_seconds: float = 0.0
    blocked_seconds: float = 0.0
    syncs: int = 0
    refused: int = 0
    skipped_steps: int = 0

    def add(self, transfer: Transfer, wait_seconds: float) -> None:
        """Count a transfer that has been applied, and how long it was waited for."""
        self.bytes_sent += transfer.pending.bytes_sent
        self.wait_seconds += wait_seconds
        self.syncs += 1


def sync_event(
    transfer: Transfer,
    history: History,
    numel: int,
    wait_seconds: float,
    report: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return this rank's record of a transfer that has just been applied (or refused)."""
    event: dict[str, Any] = {
        "fragment": transfer.fragment,
        "numel": numel,
        "round": history.rounds[transfer.fragment],
        "launched_step": transfer.launched,
        "applied_step": history.step,
        "interval": transfer.interval,
        "bytes_sent": transfer.pending.bytes_sent,
        "wait_seconds": wait_seconds,
        "transfer_seconds": transfer.pending.seconds,
        "coding_seconds": transfer.pending.coding_seconds,
        "turn_seconds": transfer.pending.turn_seconds,
        "commit_seconds": transfer.pending.commit_seconds,
        "pseudo_gradient_norm": transfer.contribution_norm,
        **report,
    }
    if transfer.sync_params.overlap is not None:
        event["overlap_steps"] = transfer.sync_params.overlap
    if transfer.sync_params.rank is not None:
        event["rank"] = transfer.sync_params.rank
        event["schedule_interval"] = transfer.sync_params.interval
        event["captured_energy"] = history.decisions.get("captured")
    parity = transfer.buffers.parity
    if parity.refused_by:
        event["refused_by"] = parity.refused_by
    if parity.uncommitted:
        event["uncommitted_by"] = parity.uncommitted
    if parity.differing:
        event["differed_in"] = parity.differing
    if parity.idle_in:
        event["idle_in"] = parity.idle_in
    return event
