"""Megatron's Muon, and the same rule on whole matrices in plain torch.

Where Emerging-Optimizers is not installed, a stand-in of its interface takes its place: what is
behind the optimizer's step is then ours, what dsx meets (the classes of Megatron around it, where
masters and momentum are, the collectives of tensor parallelism) is Megatron's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "stand_ins"))  # behind an installed one

MOMENTUM, STEPS = 0.9, 5


def muon_settings() -> dict[str, Any]:
    """What of OptimizerConfig is Muon's: whole matrices in fp32, so that no layout rounds apart."""
    return {
        "muon_momentum": MOMENTUM,
        "muon_use_nesterov": True,
        "muon_fp32_matmul_prec": "highest",
        "muon_num_ns_steps": STEPS,
        "muon_tp_mode": "duplicated",
    }


def goes_by_muon(name: str, weight: Tensor) -> bool:
    """Whether Megatron hands a parameter to Muon: the position table, too, and not the words'."""
    return weight.dim() == 2 and "word_embeddings" not in name and "output_layer" not in name


class PlainMuon:
    """One cluster's Muon, on whole matrices; query, key and value are each made orthogonal."""

    def __init__(self, weights: Mapping[str, Tensor], lr: float, decay: float, heads: int) -> None:
        self._weights, self._lr, self._decay, self._heads = weights, lr, decay, heads
        self._momentum = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    @torch.no_grad()
    def step(self) -> None:
        for name, weight in self._weights.items():
            assert weight.grad is not None
            momentum = self._momentum[name]
            momentum.lerp_(weight.grad, 1 - MOMENTUM)
            update = weight.grad.lerp(momentum, MOMENTUM)
            weight.mul_(1 - self._lr * self._decay)
            weight.sub_(self._lr * self._orthogonal(update, "linear_qkv" in name))

    def _orthogonal(self, update: Tensor, is_qkv: bool) -> Tensor:
        if is_qkv:
            grouped = update.unflatten(0, (self._heads, 3, -1))
            parts = [_scaled(part.flatten(0, 1)) for part in grouped.unbind(1)]
            return torch.stack(
                [part.unflatten(0, (self._heads, -1)) for part in parts], dim=1
            ).flatten(0, 2)
        return _scaled(update)


def _scaled(update: Tensor) -> Tensor:
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp

    return newton_schulz_tp(update, STEPS, "quintic", None) * max(update.shape) ** 0.5
