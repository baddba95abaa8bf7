"""The norm behind a scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean squares of groups of channels."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x `[..., hidden_size]`."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        scale = groups.square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        return ((groups * scale).flatten(-2) * self.weight).to(x.dtype)
