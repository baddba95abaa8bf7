"""Delay compensation: move the anchor on by the local progress of the tau steps it missed.

Source: CoCoDC (arXiv:2504.17672, eq. 4-8, Alg. 1). With `sent` the parameters at launch:

    g      = (sent - local) / tau                          eq. 4, the mean descent per step
    g_corr = g + lambda * g*g * (anchor - sent) / I        eq. 7, diagonal Fisher
    local  = anchor - tau * g_corr                         eq. 8

I is the number of inner steps from the launch before to this one. The paper writes H and gives the
reason: the difference "is accumulated over the previous H steps". So it is where every fragment
goes once in H steps; an adaptive schedule sends some oftener, and their differences are of the
steps since their last launch. The same steps divide the norm in eq. 11 (adaptive_transmission.py).

Deviation: the paper prints `+ tau * g_corr` in eq. 8, which with its own eq. 4 would undo the
local steps. Identity: C = 1 with sgd(1) gives `anchor = sent`, hence local stays, for any lambda.

The paper's constant lambda = 0.5 multiplies g*g: with g of order 1e-4 the correction is 1e-7 of
g, so it acts as lambda = 0. `mode` offers two scales at which it does act:
`dc_asgd` (lambda / sqrt(mean(g*g) + 1e-7), as DC-ASGD, arXiv:1609.08326) and `scale_free`
(lambda / mean(g*g), the correction clamped to |g|). Means are over one tensor. The sync's record
carries the size of the correction against that of g.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from dsx.core.checks import require_bounds, require_choice
from dsx.core.registry import register
from dsx.core.types import SyncView
from dsx.method.delay.base import DelayPolicy, require_overlap

if TYPE_CHECKING:
    from torch import Tensor

Mode = Literal["constant", "dc_asgd", "scale_free"]


@register("delay", "compensation")
@dataclass(frozen=True)
class DelayCompensation(DelayPolicy):
    """Apply `steps` (tau) inner steps after launch, corrected with `strength` (the paper's lambda).

    Clusters differ by construction: a finished run hands out the mean of their parameters.
    """

    steps: Annotated[int, Ge(1)] | Literal["auto"]
    """The inner steps (tau) between launch and apply, from 1 and below the period H; "auto": as
    many as a transfer takes on the line, from 1 to H/2, by measurements that clusters agree on."""
    strength: Annotated[float, Ge(0), "the paper uses 0.5, and 0 leaves the correction out"] = 0.5
    """The weight (lambda) of the correction, at least 0, where 0 leaves it out."""
    mode: Mode = "constant"
    """How the correction is scaled: as in the paper (constant), or so that it acts: over the root
    (dc_asgd) or the mean (scale_free) of the squares."""

    keeps = "local"
    export = "mean"
    needs_local = True

    def validate(self, interval: int) -> None:
        """Require 1 <= tau < H and lambda >= 0."""
        require_bounds("delay", self)
        require_overlap(self.steps, interval)
        require_choice("delay.mode", self.mode, Mode)

    @property
    def measures_tensors(self) -> bool:
        """Where the correction is scaled by what each tensor's squares are."""
        return self.mode != "constant"

    @property
    def takes_parts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Unless it measures tensors."""
        return not self.measures_tensors

    def merge(self, view: SyncView) -> Tensor:
        """Return the corrected parameters, computed in place in `view.local`."""
        import torch

        local, sent, anchor = view.local, view.kept, view.anchor
        assert local is not None and sent is not None
        if view.age == 0:  # drained at its own launch: nothing was missed
            return local.copy_(anchor)
        # Eq. (4), arXiv:2504.17672
        descent = torch.sub(sent, local, out=local).div_(view.age)
        correction = self._correction(descent, view)
        view.report["descent_norm"] = torch.linalg.vector_norm(descent)
        view.report["correction_norm"] = torch.linalg.vector_norm(correction)
        corrected = descent.add_(correction)
        return torch.sub(anchor, corrected.mul_(view.age), out=local)  # Eq. (8), descending

    def _correction(self, descent: Tensor, view: SyncView) -> Tensor:
        """Eq. (7): return `lambda * g*g * (anchor - sent) / I`, computed in place of `sent`."""
        import torch

        assert view.kept is not None
        distance = torch.sub(view.anchor, view.kept, out=view.kept)
        if self.mode == "constant":
            correction = distance.mul_(descent).mul_(descent)
            return correction.mul_(self.strength / view.interval)
        mean_square = view.per_tensor.rms(descent).square_()
        if self.mode == "dc_asgd":
            factors = mean_square.add_(1e-7).rsqrt_()
        else:
            factors = torch.where(mean_square > 0, 1 / mean_square, 0.0)
        scale = view.per_tensor.spread(factors.mul_(self.strength / view.interval), view.scratch)
        correction = distance.mul_(descent).mul_(descent).mul_(scale)
        if self.mode == "scale_free":
            bound = torch.abs(descent, out=view.scratch)
            torch.minimum(correction, bound, out=correction)
            torch.maximum(correction, bound.neg_(), out=correction)
        return correction
