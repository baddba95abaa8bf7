"""Parameter averaging: what is sent are the parameters, and their mean replaces them.

Source: LocalSGD (arXiv:1805.09767) and DreamDDP (arXiv:2502.11058, eq. 5): `local = mean of the
clusters' local`, per layer, with no anchor and no outer state.

Where the parameters have changed since they were sent (tau > 0, or sent before this step's
update), the change is kept: `local += mean(sent) - sent`, never an overwrite. That takes a copy of
what was sent. Where they have not changed, the mean itself is written, so that all clusters hold
the same bits, and there is no such copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsx.core.checks import require_bounds
from dsx.core.registry import register
from dsx.core.types import SyncView
from dsx.method.delay.base import DelayPolicy, Steps, require_overlap

if TYPE_CHECKING:
    from torch import Tensor


@register("delay", "average")
@dataclass(frozen=True)
class Average(DelayPolicy):
    """Average parameters `steps` (tau) inner steps after they were sent."""

    steps: Steps = 0
    """The inner steps (tau) between launch and apply, from 0 and below the period H; "auto": as
    many as a transfer takes on the line, from 1 to H/2, by measurements that clusters agree on."""

    keeps = "local"
    keeps_current = False
    export = "mean"
    needs_local = True
    needs_anchor = False
    takes_parts = True

    def validate(self, interval: int) -> None:
        """Require 0 <= tau < H."""
        require_bounds("delay", self)
        require_overlap(self.steps, interval)

    def contribution(self, local: Tensor, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return the parameters themselves."""
        return local

    def merge(self, view: SyncView) -> Tensor:
        """Return the mean, or `view.local` moved in place by what averaging changed."""
        import torch

        assert view.local is not None
        if view.mean is None:  # a round that was refused
            return view.local
        if view.is_current:
            return view.mean
        assert view.kept is not None
        return view.local.add_(torch.sub(view.mean, view.kept, out=view.mean))
