"""Overlap within the period: keep training for tau steps, then blend the anchor in.

Source: Streaming DiLoCo (arXiv:2501.18512, Sec. 2.2) and CoCoDC (arXiv:2504.17672, eq. 1-3):
`local = (1 - alpha) * local(t_apply) + alpha * anchor`.

Deviation: alpha is the weight of the *global* state, as in CoCoDC; the Streaming DiLoCo paper
and torchft define it as the weight of the local one. Invariant: `alpha=1` with `steps=0` equals
`Blocking` bit for bit, which is why the weighted sum is written out and 1 is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le

from dsx.core.checks import require_bounds
from dsx.core.registry import register
from dsx.core.types import SyncView
from dsx.method.delay.base import DelayPolicy, Steps, require_overlap
from dsx.method.in_one_pass import blend_

if TYPE_CHECKING:
    from torch import Tensor


@register("delay", "streaming")
@dataclass(frozen=True)
class StreamingMerge(DelayPolicy):
    """Apply `steps` (tau) inner steps after launch, mixing with weight `alpha` of the anchor.

    The local progress made meanwhile is kept in part. Clusters differ by construction: what a
    finished run hands out is the mean of their parameters.
    """

    steps: Steps
    """The inner steps (tau) between launch and apply, from 0 and below the period H; "auto": as
    many as a transfer takes on the line, from 1 to H/2, by measurements that clusters agree on."""
    alpha: Annotated[
        float, Gt(0), Le(1),
        "it is the weight of the anchor (global state); 0.5 is Streaming DiLoCo's choice",
    ] = 0.5  # fmt: skip
    """The weight of the anchor in what the parameters become, above 0 and at most 1."""

    export = "mean"
    needs_local = True
    takes_parts = True

    def validate(self, interval: int) -> None:
        """Require 0 <= tau < H (one transfer of a fragment in flight) and 0 < alpha <= 1."""
        require_bounds("delay", self)
        require_overlap(self.steps, interval)

    def merge(self, view: SyncView) -> Tensor:
        """Blend the anchor into `view.local` in place and return it."""
        assert view.local is not None
        if self.alpha == 1.0:
            return view.local.copy_(view.anchor)
        return blend_(view.local, view.anchor, view.scratch, self.alpha)
