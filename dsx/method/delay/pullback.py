"""Overlap-Local-SGD: pull the local model toward an anchor that is one round late.

Source: Overlap-Local-SGD (Wang et al., arXiv:2002.09539, eq. 3-5 and its momentum variant). At the
end of every round, with z the anchor whose averaging has gone on during the round,

    x' = (1 - alpha) * x + alpha * z                  the pullback; training goes on from x'
    z' = OuterOpt(z, z - mean x')                     arrives by the end of the next round

With sgd of rate 1, z' is the mean of the x'; with heavy-ball momentum (rate 1, 0.7) it is the
paper's momentum variant. The inner optimizer is left as it is.

Here what is sent leaves before the mean of the round before has been taken in, so it is x itself,
as a distance from the anchor of then; x' is linear in x, and all clusters know both anchors:

    z - mean x' = (1 - alpha) * (mean(z_before - x) + z - z_before)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt

from dsx.core.checks import require_bounds
from dsx.core.registry import register
from dsx.core.types import SyncView
from dsx.method.delay.base import DelayPolicy
from dsx.method.in_one_pass import blend_

if TYPE_CHECKING:
    from torch import Tensor


@register("delay", "pullback")
@dataclass(frozen=True)
class Pullback(DelayPolicy):
    """Move the parameters by the share `alpha` toward the anchor, which is one round late."""

    alpha: Annotated[
        float, Gt(0), Lt(1), "it is the weight of the anchor; Overlap-Local-SGD uses 0.6"
    ] = 0.6  # fmt: skip
    """The weight of the anchor in what the parameters become, above 0 and below 1."""

    steps = 0
    needs_local = True
    shared_slots = ("before",)
    takes_parts = True

    @property
    def rounds_under_way(self) -> int:
        """Return 1."""
        return 1

    def fresh_share(self, num_clusters: int) -> None:
        """Return None: local parameters are pulled, not replaced."""
        return

    def slots(self, outer_slots: tuple[str, ...]) -> tuple[str, ...]:
        """Return the anchor from which what is under way has been measured."""
        return ("before",)

    def begin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Start from the anchor."""
        slots["before"].copy_(anchor)

    def validate(self, interval: int) -> None:
        """Require 0 < alpha < 1."""
        require_bounds("delay", self)

    def gradient(self, mean: Tensor, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return `anchor - mean x'`, in place of the mean distance from the anchor before."""
        before = slots["before"]
        mean.sub_(before).add_(anchor).mul_(1 - self.alpha)
        before.copy_(anchor)  # what has just been launched was measured from it
        return mean

    def merge(self, view: SyncView) -> Tensor:
        """Pull `view.local` toward the anchor, in place, and return it."""
        assert view.local is not None
        if view.mean is None:  # nothing has come, or it was refused: the anchor is as it was
            view.slots["before"].copy_(view.anchor)
        return blend_(view.local, view.anchor, view.scratch, self.alpha)
