"""Matrices of known spectra for tests of low-rank channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsx.compress.low_rank import LowRank

# fp32 everywhere, and whatever saves a byte in factors: PowerSGD as published
EXACT: dict[str, Any] = {
    "wire": "fp32",
    "mean_wire": "fp32",
    "small_wire": "fp32",
    "factor_wire": "fp32",
    "min_saving": 1.0,
}


def orthonormal(numel: int, rank: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(numel, rank, generator=generator)).Q


def matrix(m: int, n: int, singular_values: Tensor, seed: int) -> Tensor:
    """A random matrix of these singular values, flat."""
    generator = torch.Generator().manual_seed(seed)
    rank = len(singular_values)
    left, right = orthonormal(m, rank, generator), orthonormal(n, rank, generator)
    return ((left * singular_values) @ right.T).reshape(-1)


def decaying(m: int, n: int, num_clusters: int, kind: str = "power", seed: int = 0) -> list[Tensor]:
    """One matrix per cluster: a common one and a smaller own one, of a decaying spectrum."""
    index = torch.arange(1.0, min(m, n) + 1)
    values = 1 / index if kind == "power" else torch.exp(-index / 6)
    common = matrix(m, n, values, seed)
    return [common + 0.7 * matrix(m, n, values, 100 + seed + c) for c in range(num_clusters)]


def side_by_side(*parts: list[Tensor]) -> list[Tensor]:
    """The clusters' fragments of the clusters' parts."""
    return [torch.cat(list(own)) for own in zip(*parts, strict=True)]


def plain_low_rank(**fields: Any) -> LowRank:
    """Without error feedback, unless asked for: what one round makes of its input alone."""
    return LowRank(**{"error_feedback": "none", **fields})
