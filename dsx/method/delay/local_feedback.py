"""Error feedback in the local parameters: what was not sent is not taken back.

Source: CocktailSGD (Wang et al., ICML 2023) and its authors' code: a cluster sends the difference
between its local model and the global one, in codes; takes from the local model what has been sent
of it; and adds the mean to both. With s what everybody decodes of a cluster's own codes,

    D = anchor - local,  without s that are under way;   s = decoded(codes of D)
    anchor' = OuterOpt(anchor, mean s);                  local' = anchor' - (D - s)

so D - s is what residuals elsewhere hold (compress/error_feedback.py), and is sent later just as
well; but here gradients are those of the local model, which has it, so the inner optimizer sees
what it has done. The messages of both would be the same if the gradients were.

The authors exchange while the next step is computed and apply before its update. Here that is
`outer_steps` 1: a mean is applied at the next launch, and until then a cluster goes on from all of
its own s. 0 waits. A round that is refused leaves everything local, to be sent again.
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


@register("delay", "local_feedback")
@dataclass(frozen=True)
class LocalFeedback(DelayPolicy):
    """Keep what coding has not sent in the local parameters, and send it later."""

    outer_steps: Annotated[
        int, Ge(0), Le(1),
        "CocktailSGD overlaps a transfer with one step; for longer transfers use a larger "
        "schedule.interval",
    ] = 1  # fmt: skip
    """How many launches late a mean is applied: 1, or 0, which waits for it."""

    steps = 0
    keeps = "contribution"
    keeps_unsent = True

    @property
    def rounds_under_way(self) -> int:
        """Return 0 or 1."""
        return self.outer_steps

    def fresh_share(self, num_clusters: int) -> float:
        """Return 1: a cluster goes on from all of what it has under way."""
        return 1.0

    def slots(self, outer_slots: tuple[str, ...]) -> tuple[str, ...]:
        """Return what was launched last before coding, and what of it is under way."""
        return ("unsent", "under_way") if self.outer_steps else ("unsent",)

    def begin(self, anchor: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Start from the anchor: nothing is unsent, nothing under way."""
        for slot in slots.values():
            slot.zero_()

    def validate(self, interval: int) -> None:
        """Require 0 or 1."""
        require_bounds("delay", self)

    def contribution(self, local: Tensor, anchor: Tensor, slots: Mapping[str, Tensor]) -> Tensor:
        """Return `anchor - local` without what is under way, in place of `local`; remember it."""
        import torch

        torch.sub(anchor, local, out=local)
        if self.outer_steps:
            local.sub_(slots["under_way"])
        slots["unsent"].copy_(local)
        return local

    def merge(self, view: SyncView) -> Tensor:
        """Return the anchor without what is unsent, and without what is under way.

        `unsent_norm` of the report is that of what has neither been sent nor is under way.
        """
        import torch

        distance, unsent = view.slots["unsent"], view.slots["unsent"]
        if self.outer_steps:
            under_way = view.slots["under_way"].zero_()
            for contribution in view.own:
                under_way.add_(contribution)
            if view.mean is None and view.kept is not None:  # refused: nobody has applied it
                distance.add_(view.kept)
            unsent = torch.sub(distance, under_way, out=view.scratch)
        elif view.mean is not None:
            assert view.kept is not None
            distance.sub_(view.kept)
        view.report["unsent_norm"] = torch.linalg.vector_norm(unsent)
        return torch.sub(view.anchor, distance, out=view.scratch)
