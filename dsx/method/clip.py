"""The clip of what an outer step applies: CO2's (arXiv:2401.16265, Alg. 1, l. 13)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dsx.core.checks import require_choice
from dsx.core.types import PerTensor

if TYPE_CHECKING:
    from torch import Tensor

ClipUnit = Literal["absolute", "rms"]


def clip_to(
    direction: Tensor, clip: float, unit: str, per_tensor: PerTensor, scratch: Tensor
) -> Tensor:
    """Clamp `direction` `[numel]` in place to +-clip, a constant or a multiple of tensors' RMS.

    `scratch` is work space as long as that.
    """
    import torch

    if unit == "absolute":
        return direction.clamp_(-clip, clip)
    bound = per_tensor.spread(per_tensor.rms(direction).mul_(clip), scratch)
    torch.minimum(direction, bound, out=direction)
    return torch.maximum(direction, bound.neg_(), out=direction)


def require_clip(clip: float | None, unit: str) -> None:
    """Raise ValueError for a unit that is none, or has no effect."""
    require_choice("outer_optimizer.clip_unit", unit, ClipUnit)
    if clip is None and unit != "absolute":
        raise ValueError(
            f"outer_optimizer.clip_unit={unit!r} has no effect without outer_optimizer.clip; "
            "set clip, e.g. 3.0 (times the RMS), or leave clip_unit out"
        )
