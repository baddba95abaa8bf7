"""The base class of Muon, and the scale of its updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """Return what an orthogonal update is multiplied by."""
    assert mode == "spectral", mode
    return max(size_out, size_in) ** 0.5


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """SGD with momentum whose update a subclass makes orthogonal."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        weight_decay: float,
        *,
        use_nesterov: bool,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., Tensor],
    ) -> None:
        assert weight_decay_method == "decoupled", weight_decay_method
        values = {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay}
        super().__init__(params, values)
        self.use_nesterov = use_nesterov
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, beta = self.state[p], group["momentum_beta"]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"]
                momentum.mul_(beta).add_(p.grad, alpha=1 - beta)
                update = momentum
                if self.use_nesterov:
                    update = (1 - beta) * p.grad + beta * momentum
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * self.orthogonalize(p, update))
