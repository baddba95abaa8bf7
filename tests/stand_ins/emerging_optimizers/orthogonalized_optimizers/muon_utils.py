"""Newton-Schulz iterations of a matrix that tensor-parallel ranks hold slices of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def newton_schulz_tp(
    x: Tensor,
    steps: int,
    coefficient_type: str,
    tp_group: Any,
    partition_dim: int | None = None,
    mode: str = "duplicated",
) -> Tensor:
    """Return this rank's slice of the whole matrix made orthogonal, which every rank computes."""
    assert mode == "duplicated", mode
    if partition_dim is None:
        return _newton_schulz(x, steps)
    slices = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(slices, x.contiguous(), tp_group)
    whole = _newton_schulz(torch.cat(slices, dim=partition_dim), steps)
    return whole.chunk(tp_group.size(), dim=partition_dim)[tp_group.rank()]


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Take every singular value to about 1."""
    is_tall = x.size(-2) > x.size(-1)
    wide = x.mT if is_tall else x
    wide = wide / wide.norm().clamp_min(1e-7)
    for _ in range(steps):
        square = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide.mT if is_tall else wide
