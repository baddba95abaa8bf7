"""The contract of a controller, and the one that changes nothing.

Every cluster must take the same decision, so a controller reads nothing but the `History`, the
method's initial sync parameters, and measurements that one owner made and the transfer handed to
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dsx.core.registry import contract, register
from dsx.core.types import Fragment, History, SyncParams

if TYPE_CHECKING:
    from torch import Tensor


@contract("control")
class Control(Protocol):
    """Returns the sync parameters in force, and may change its mind after every transfer.

    It never does by default; one that measures says `sideband_numel`, `measure`, `decide` and
    `sync_params`.
    """

    @property
    def uses_seconds(self) -> bool:
        """Whether it decides from measured times, which then travel with the transfers."""
        return False

    @property
    def largest_rank(self) -> int:
        """Return the largest rank it may ever set; 0 if it sets none."""
        return 0

    def validate(self, initial: SyncParams) -> None:
        """Raise ValueError for values that cannot work with the initial sync parameters."""

    def lowest_interval(self, initial: SyncParams) -> int:
        """Return the smallest H it may ever set."""
        return initial.interval

    def moves(self, initial: SyncParams) -> bool:
        """Whether it may ever change H or the rank."""
        return False

    def sideband_numel(self, initial: SyncParams) -> int:
        """Return how many values `measure` gives."""
        return 0

    def measure(self, mean: Tensor, fragment: Fragment, sync_params: SyncParams) -> Tensor:
        """Return this shard's measurements of a mean, fp32 on the CPU; shards' values add up.

        Called on the owner's transfer thread.
        """
        import torch

        return torch.empty(0)

    def decide(
        self,
        measured: Sequence[float],
        launched_with: SyncParams,
        initial: SyncParams,
        history: History,
    ) -> None:
        """Take a transfer's measurements into account, in `history.decisions`, in place.

        `launched_with` are the sync parameters that were in force at its launch.
        """

    def settle(
        self,
        stages: Sequence[Sequence[float]],
        takes_turns: bool,
        initial: SyncParams,
        history: History,
    ) -> None:
        """Take one H for all stages of a pipeline, from what each has for `proposal`, in place.

        Every stage calls it at the same step, with the same values in the order of the stages.
        `takes_turns`: they do not send at the same time.
        """

    def proposal(self, initial: SyncParams, history: History) -> Sequence[float] | None:
        """Return what the other stages must know; None if H never moves."""
        return None

    def sync_params(self, initial: SyncParams, history: History) -> SyncParams:
        """Return what is in force."""
        return initial


@register("control", "fixed")
@dataclass(frozen=True)
class Fixed(Control):
    """The configured values, for ever."""
