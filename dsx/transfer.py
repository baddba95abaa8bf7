"""One fragment under way: when it was launched, the handle to wait on, and its buffers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsx.comm.base import Pending
from dsx.state import Berth
from dsx.types import Knobs


@dataclass
class Transfer:
    """A launched fragment; `interval` is the inner steps from the launch before to this one.

    `was_sent_before_update`: the parameters it carries are from before that step's inner update.
    `shared_by`: the fragments launched at the same boundary, which share the link. `knobs`: what
    was in force at the launch.
    """

    fragment: int
    launched: int
    interval: int
    pending: Pending
    berth: Berth
    contribution_norm: Tensor
    knobs: Knobs
    was_sent_before_update: bool = False
    shared_by: int = 1


@dataclass
class NothingYet:
    """The empty transfer a next-sync policy starts with: no outer step, only a merge."""

    fragment: int


class Arrived:
    """A transfer that has ended: restored from a checkpoint, or empty on this rank."""

    def __init__(self, mean: Tensor, bytes_sent: int = 0, seconds: float = 0.0) -> None:
        self._mean = mean
        self.bytes_sent = bytes_sent
        self.seconds = seconds

    def wait(self) -> Tensor:
        """Return the mean at once."""
        return self._mean


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
