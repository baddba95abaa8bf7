"""Eager overlap: while the mean of a round is under way, go on from one's own share of it.

Source: Eager Updates (arXiv:2502.12996, Alg. 3). The paper gives each cluster its own anchor and
the gradient `E_k^m = D_{k-n} + (D_k^m - D_{k-n}^m) / C`. For a linear outer rule that splits
exactly into a shared part and a local look-ahead, which is what runs here:

    S_{k+1} = OuterOpt(S_k, D_{k-n})                       identical bytes on every cluster
    w = sum of the cluster's own D_{k-j}^m, j < n          as decoded from the wire
    local = S_{k+1} - (1/C) * update(w)                    the outer rule's update for w, with its
                                                           own momentum v^m = mu*v^m + w

Deviation: the shared form, because anchors then stay bit-identical, a joining cluster copies S,
and a checkpoint holds one model. D_k^m is measured from where the cluster itself started the
round (its look-ahead), not from S. n = `outer_steps` transfers of a fragment stay under way.

"As decoded from the wire": in codes, D_k^m is what everybody decodes of this cluster's message, the
residual of earlier rounds in it, so one cluster alone is DiLoCo to the bit. It takes the encoding
into the launch, where the training thread waits for it. With four clusters or more the mean of
these is encoded once more by its owners (averaging.py): half a step of `mean_wire` in each element
at most, and with error feedback half a step of the round before, is the one difference that is left
between the look-ahead and what is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from dsx.core.checks import require_bounds
from dsx.core.registry import register
from dsx.core.types import SyncView
from dsx.method.delay.base import DelayPolicy

if TYPE_CHECKING:
    from torch import Tensor


@register("delay", "eager")
@dataclass(frozen=True)
class Eager(DelayPolicy):
    """Apply a fragment's mean `outer_steps` launches later; look ahead by one's own share."""

    outer_steps: Annotated[
        int, Ge(1), Le(2),
        "each further outer step of overlap halves the largest stable outer rate and more; use 1, "
        "or a larger schedule.interval",
    ] = 1  # fmt: skip
    """How many rounds late a mean is applied, 1 or 2; 2 needs a lower outer rate."""

    steps = 0
    keeps = "contribution"
    splits_update = True
    takes_parts = True

    def fresh_share(self, num_clusters: int) -> float:
        """Return the cluster's own share of a mean."""
        return 1 / num_clusters

    @property
    def rounds_under_way(self) -> int:
        """Return n."""
        return self.outer_steps

    def slots(self, outer_slots: tuple[str, ...]) -> tuple[str, ...]:
        """Return where the round started, and the look-ahead's own copy of the outer state."""
        return ("start", *outer_slots)

    def begin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Start the first round from the anchor, the look-ahead from nothing."""
        for slot in slots.values():
            slot.zero_()
        slots["start"].copy_(anchor)

    def validate(self, interval: int) -> None:
        """Require n in {1, 2}, the paper's range."""
        require_bounds("delay", self)

    def origin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return where the round started."""
        return slots["start"]

    def merge(self, view: SyncView) -> Tensor:
        """Return the anchor plus the look-ahead; the anchor itself when nothing is under way."""
        import torch

        start = view.slots["start"]
        if not view.own:  # the end of a run: everything has been applied
            return start.copy_(view.anchor)
        w = start.copy_(view.own[0])
        for contribution in view.own[1:]:
            w.add_(contribution)
        ahead = view.outer_update(w).div_(view.num_clusters)
        view.report["look_ahead_norm"] = torch.linalg.vector_norm(ahead)
        return torch.sub(view.anchor, ahead, out=start)
