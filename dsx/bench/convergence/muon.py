"""Muon over all matrices of one shape at once, in fp32.

`torch.optim.Muon` takes them one by one in bf16, which on a CPU takes six times as long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

SLOW = "slow_buffer"
_SLOW_MOMENTUM = 0.99  # a half-life of 69 steps
_STEPS, _COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """The rule of `torch.optim.Muon` with Nesterov momentum and `match_rms_adamw`.

    Source: Jordan et al. 2024, scaled as in Liu et al., arXiv:2502.16982. Matrices only. `slow`:
    the part in the update of a momentum that remembers for longer (MT-DAO, Iacob et al.,
    arXiv:2510.05361, in the terms of its quasi-hyperbolic update).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        slow: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "slow": slow}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step every matrix that has a gradient; there is no closure."""
        for group in self.param_groups:
            lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
            alike: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = parameter.grad.lerp(buffer, momentum)
                if group["slow"]:
                    slow = state.setdefault(SLOW, torch.zeros_like(parameter))
                    slow.lerp_(parameter.grad, 1 - _SLOW_MOMENTUM)
                    update = update.lerp(slow, group["slow"])
                wide = update.T if update.shape[0] > update.shape[1] else update
                alike.setdefault((wide.shape[0], wide.shape[1]), []).append((parameter, wide))
            for (_, most), pairs in alike.items():
                directions = orthogonalized(torch.stack([wide for _, wide in pairs]))
                for (parameter, _), direction in zip(pairs, directions, strict=True):
                    own = direction if direction.shape == parameter.shape else direction.T
                    parameter.mul_(1 - lr * decay).add_(own, alpha=-0.2 * math.sqrt(most) * lr)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices `[n, rows, columns]`, rows <= columns, with singular values near 1.

    Five steps of Newton and Schulz with Jordan's coefficients.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.float()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)
