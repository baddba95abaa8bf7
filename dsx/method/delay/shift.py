"""Keep one's own progress: the local parameters move by what the mean changes, and by no more.

Source: CocktailSGD (Wang et al., ICML 2023) and its authors' code, where the transfer takes a step;
here it may take any number of them. With q what everybody decodes of a cluster's own codes, and
`step` what the outer rule makes of the mean of all q,

    launch:  D = anchor - local, without the q under way;  q = decoded(codes of D)
    arrive:  anchor' = anchor - step;                      local' = local + q - step

so what has been done since the launch, and what the codes have lost, D - q, stay in the local
parameters and are sent later. Residuals elsewhere (compress/error_feedback.py) would hold the same
D - q, but here gradients are those of a model that has it: the inner optimizer sees what it has
done, and there is no buffer for it. At an outer rate of 1 without momentum the mean of all local
parameters is touched neither by the delay nor by the codec.

A round that is refused leaves everything local, to be sent again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from dsx.core.checks import require_bounds
from dsx.core.registry import register
from dsx.core.types import SyncView
from dsx.method.delay.base import DelayPolicy, Steps, require_overlap

if TYPE_CHECKING:
    from torch import Tensor


@register("delay", "shift")
@dataclass(frozen=True)
class Shift(DelayPolicy):
    """Move the local parameters by what the mean changes, `steps` or a whole round late.

    Clusters differ by construction: what a finished run hands out is the mean of their parameters.
    """

    steps: Steps = 0
    """The inner steps (tau) between launch and apply, from 0 and below the period H; "auto": as
    many as a transfer takes on the line, from 1 to H/2, by measurements that clusters agree on."""
    outer_steps: Annotated[
        int, Ge(0), Le(1),
        "a transfer that takes longer than a round needs a larger schedule.interval, or fewer bits",
    ] = 0  # fmt: skip
    """1: a mean is applied at the fragment's next launch, which leaves out what is under way."""

    keeps = "contribution"
    export = "mean"
    needs_local = True
    keeps_unsent = True
    takes_parts = True

    @property
    def rounds_under_way(self) -> int:
        """Return 0 or 1."""
        return self.outer_steps

    def fresh_share(self, num_clusters: int) -> float:
        """Return 1: a cluster goes on from all of what it has under way."""
        return 1.0

    def slots(self, outer_slots: tuple[str, ...]) -> tuple[str, ...]:
        """Return what is under way at the next launch, where something is."""
        return ("under_way",) if self.outer_steps else ()

    def begin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Start from the anchor: nothing is under way."""
        for slot in slots.values():
            slot.zero_()

    def validate(self, interval: int) -> None:
        """Require 0 <= tau < H, or a whole round."""
        require_bounds("delay", self)
        require_overlap(self.steps, interval)
        if self.steps and self.outer_steps:
            raise ValueError(
                f"delay.steps={self.steps} and delay.outer_steps={self.outer_steps}: a mean is "
                "applied so many inner steps after its launch, or at the next launch; give one"
            )

    def contribution(self, local: Tensor, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return `anchor - local` without what is under way, in place of `local`."""
        import torch

        torch.sub(anchor, local, out=local)
        return local.sub_(slots["under_way"]) if self.outer_steps else local

    def merge(self, view: SyncView) -> Tensor:
        """Return `view.local` moved in place by `q - step`; as it is where a round is refused.

        `unsent_norm` of the report is that of what has neither been sent nor is under way.
        """
        import torch

        assert view.local is not None
        if view.step is not None:
            assert view.kept is not None
            view.local.add_(torch.sub(view.kept, view.step, out=view.scratch))
        unsent = torch.sub(view.anchor, view.local, out=view.scratch)
        if self.outer_steps:
            under_way = view.slots["under_way"].zero_()
            for contribution in view.own:
                under_way.add_(contribution)
            unsent.sub_(under_way)
        view.report["unsent_norm"] = torch.linalg.vector_norm(unsent)
        return view.local
