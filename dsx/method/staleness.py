"""The staleness gap penalty: shrink a delayed pseudo-gradient by how far the anchor has moved on.

Source: CO2 (arXiv:2401.16265, eq. 3). With Theta the anchor when D is applied, H the inner steps
of D's round, and v the displacement of the first inner step of that round:

    L = |Theta - Theta before the outer step before| / (H * |v|) + 1;    D -> D / L

`granularity="tensor"` takes L2 norms, |v| averaged over clusters: one scalar per tensor travels
with D. `"element"` is the paper's rule per element; the averaged |v| then travels with D and
doubles what is sent. A zero |v| with a moved anchor gives D / L = 0, both zero give L = 1.

Invariant: only averaged values and the anchor itself enter L, so anchors stay bit-identical.
Deviation: v is measured from where the cluster started the round; that is the anchor for the
paper's own schedule, and lets the penalty work with any schedule and delay. The paper's official
code computes a constant in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from dsx.core.checks import require_choice
from dsx.core.registry import contract, register
from dsx.core.types import Fragment, PerTensor

if TYPE_CHECKING:
    from torch import Tensor

Granularity = Literal["tensor", "element"]


@contract("staleness")
class Staleness(Protocol):
    """What is done to a mean pseudo-gradient before the outer step sees it; nothing, unless said.

    - `is_active`: whether the loop has to measure the first step of every round;
    - `shared_slots`: names of the buffers that are equal on all clusters.
    """

    is_active: bool = False
    shared_slots: tuple[str, ...] = ()

    @property
    def leaves_mean(self) -> bool:
        """Whether means are applied as they have come, and nothing is kept of updates."""
        weighs = type(self).weigh is not Staleness.weigh
        return not weighs and type(self).remember is Staleness.remember

    @property
    def is_elementwise(self) -> bool:
        """Whether its buffers and sideband are per element, and not per tensor."""
        return False

    def validate(self) -> None:
        """Raise ValueError for a value that is not known."""

    def slots(self, fragment: Fragment, num_tensors: int) -> dict[str, int]:
        """Return the buffers it keeps per fragment, `{name: elements}`, each zero at the start."""
        return {}

    def sideband_numel(self, fragment: Fragment, num_tensors: int) -> int:
        """Return the number of values that travel with a transfer and are averaged."""
        return 0

    def observe(
        self, displacement: Tensor, slots: Mapping[str, Tensor], per_tensor: PerTensor
    ) -> None:
        """Keep the size of a round's first inner step, in `slots`; uses up `displacement`."""

    def sideband(self, slots: Mapping[str, Tensor]) -> Tensor:
        """Return what travels: the size of the first step of the round that ends here."""
        import torch

        return torch.empty(0)

    def weigh(
        self, mean: Tensor, sideband: Tensor, interval: int, slots: Mapping[str, Tensor],
        per_tensor: PerTensor, scratch: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the mean to be applied, in place of `mean`; `sideband` is averaged, used up."""
        return mean

    def remember(self, update: Tensor, slots: Mapping[str, Tensor], per_tensor: PerTensor) -> None:
        """Keep the size of the outer update just made, in `slots`."""


@register("staleness", "none")
@dataclass(frozen=True)
class NoPenalty(Staleness):
    """Apply the mean as it is."""


@register("staleness", "gap")
@dataclass(frozen=True)
class GapPenalty(Staleness):
    """CO2's penalty, with one factor per tensor or per element."""

    granularity: Granularity = "tensor"
    """One factor per tensor, or per element, which sends as much again as the gradient."""

    is_active = True
    shared_slots = ("last_update",)

    @property
    def is_elementwise(self) -> bool:
        """As `granularity` says."""
        return self.granularity == "element"

    def validate(self) -> None:
        """Require a known granularity."""
        require_choice("staleness.granularity", self.granularity, Granularity)

    def slots(self, fragment: Fragment, num_tensors: int) -> dict[str, int]:
        """Return the last first step and the last outer update, as norms or elementwise."""
        numel = self.sideband_numel(fragment, num_tensors)
        return {"first_step": numel, "last_update": numel}

    def sideband_numel(self, fragment: Fragment, num_tensors: int) -> int:
        """Return one value per tensor or per element."""
        return num_tensors if self.granularity == "tensor" else fragment.numel

    def observe(
        self, displacement: Tensor, slots: Mapping[str, Tensor], per_tensor: PerTensor
    ) -> None:
        """Keep |displacement| in `slots`, as norms or elementwise."""
        self._keep(displacement, slots["first_step"], per_tensor)

    def sideband(self, slots: Mapping[str, Tensor]) -> Tensor:
        """Return the sizes kept by `observe`."""
        return slots["first_step"]

    def weigh(
        self, mean: Tensor, sideband: Tensor, interval: int, slots: Mapping[str, Tensor],
        per_tensor: PerTensor, scratch: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return D / L, in place of `mean`."""
        import torch

        moved = slots["last_update"]
        # 1 / L = reach / (moved + reach) is 0 and 1 in the two limits, without a division by 0
        reach = sideband.mul_(interval)
        if self.granularity == "tensor":
            factors = torch.where(moved + reach == 0, 1.0, reach / (moved + reach))
            return mean.mul_(per_tensor.spread(factors, scratch))
        total = torch.add(moved, reach, out=scratch)
        return mean.mul_(reach.div_(total).masked_fill_(total == 0, 1.0))

    def remember(self, update: Tensor, slots: Mapping[str, Tensor], per_tensor: PerTensor) -> None:
        """Keep |update| in `slots`, as norms or elementwise."""
        self._keep(update, slots["last_update"], per_tensor)

    def _keep(self, x: Tensor, out: Tensor, per_tensor: PerTensor) -> None:
        import torch

        if self.granularity == "tensor":
            out.copy_(per_tensor.norms(x))
        else:
            torch.abs(x, out=out)
