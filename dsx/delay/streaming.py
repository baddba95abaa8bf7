"""Overlap within the period: keep training for tau steps, then blend the anchor in.

Source: Streaming DiLoCo (arXiv:2501.18512, Sec. 2.2) and CoCoDC (arXiv:2504.17672, eq. 1-3):
`local = (1 - alpha) * local(t_apply) + alpha * anchor`.

Deviation: alpha is the weight of the *global* state, as in CoCoDC; the Streaming DiLoCo paper
and torchft define it as the weight of the local one. Invariant: `alpha=1` with `steps=0` equals
`Replace` bit for bit, which is why the weighted sum is written out and 1 is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsx.types import SyncView


@dataclass(frozen=True)
class Blend:
    """Apply `steps` (tau) inner steps after launch, mixing with weight `alpha` of the anchor."""

    steps: int
    alpha: float = 0.5

    @property
    def needs_local(self) -> bool:
        """The local progress made meanwhile is kept in part."""
        return True

    @property
    def export(self) -> Literal["anchor", "mean"]:
        """Clusters differ by construction: the mean of their parameters is the model."""
        return "mean"

    def validate(self, interval: int) -> None:
        """Require 0 <= tau < H (one transfer of a fragment in flight) and 0 < alpha <= 1."""
        if not 0 <= self.steps < interval:
            raise ValueError(
                f"delay.steps={self.steps} must be at least 0 and below schedule.interval="
                f"{interval}: a fragment's transfer has to be applied before its next launch; "
                f"use steps <= {interval - 1} or a larger interval"
            )
        if not 0 < self.alpha <= 1:
            raise ValueError(
                f"delay.alpha={self.alpha} must be above 0 and at most 1: it is the weight of the "
                "anchor (global state); 0.5 is Streaming DiLoCo's choice"
            )

    def is_ripe(self, age: int, newer: int) -> bool:
        """After tau steps."""
        return age >= self.steps

    def outer_grad(self, view: SyncView) -> Tensor:
        """Return the plain mean."""
        return view.mean

    def merge(self, view: SyncView) -> Tensor:
        """Blend the anchor into `view.local` in place and return it."""
        assert view.local is not None
        if self.alpha == 1.0:
            return view.local.copy_(view.anchor)
        share = torch.mul(view.anchor, self.alpha, out=view.scratch)
        return view.local.mul_(1 - self.alpha).add_(share)
