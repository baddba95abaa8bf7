"""One outer step of delay: launch round k's pseudo-gradient, apply round k-1's.

Source: DiLoCoX (arXiv:2506.21263, Sec. 2.3), CO2 (arXiv:2401.16265, Alg. 1), and the "naive"
delay of Eager Updates (arXiv:2502.12996, Alg. 2): `anchor = OuterOpt(anchor, D_{k-1}); local =
anchor`. `D_k = anchor - local` is measured against the anchor the round started from, so no local
progress is lost: it arrives one round later. A transfer has H steps of compute to hide behind.

First round, where D_{-1} does not exist: `restart` (every cluster returns to the first anchor, no
outer step is taken) or `local` (round 1 goes on from each cluster's own parameters, and D_1 is
measured from there, which costs one more vector of memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dsx.core.checks import require_choice
from dsx.core.registry import register
from dsx.core.types import SyncView
from dsx.method.delay.base import DelayPolicy

if TYPE_CHECKING:
    from torch import Tensor

FirstRound = Literal["restart", "local"]


@register("delay", "one_step")
@dataclass(frozen=True)
class OneStepDelay(DelayPolicy):
    """Apply a fragment's mean at its next launch."""

    first_round: FirstRound = "restart"
    """What the first round ends with, when nothing has arrived yet: a return to the first anchor
    (restart), or the cluster's own parameters (local), which takes one more vector of memory."""

    steps = 0
    takes_parts = True

    @property
    def rounds_under_way(self) -> int:
        """Return 1."""
        return 1

    @property
    def needs_local(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Only to go on from it after the first round."""
        return self.first_round == "local"

    @property
    def restarts_from_anchor(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Unless the first round goes on locally."""
        return self.first_round == "restart"

    def slots(self, outer_slots: tuple[str, ...]) -> tuple[str, ...]:
        """Return where the round started, if that is not always the anchor."""
        return ("start",) if self.first_round == "local" else ()

    def begin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Start the first round from the anchor."""
        if self.first_round == "local":
            slots["start"].copy_(anchor)

    def validate(self, interval: int) -> None:
        """Accept every interval."""
        require_choice("delay.first_round", self.first_round, FirstRound)

    def origin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return where the round started."""
        return slots["start"] if self.first_round == "local" else anchor

    def merge(self, view: SyncView) -> Tensor:
        """Return the anchor; after the first round the local parameters, if so chosen."""
        if self.first_round == "restart":
            return view.anchor
        if view.mean is None:
            assert view.local is not None
            view.slots["start"].copy_(view.local)
            return view.local
        view.slots["start"].copy_(view.anchor)
        return view.anchor
