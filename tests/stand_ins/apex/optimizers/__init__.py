"""FusedAdam as in apex of July 2026 (`apex/optimizers/fused_adam.py`): what it keeps where.

Its kernels make fp16 weights of the masters, step fp32 masters beside fp32 parameters, and step
bf16 parameters without their masters. Masters are in no state dict.
"""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with a step count for each group, and masters in `param_groups_master`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if master_weights and not capturable:
            raise RuntimeError("masters are of the capturable version")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.master_weights = master_weights
        self.param_groups_master = [
            {
                "params": [
                    p.clone().detach().float() if master_weights else None for p in g["params"]
                ]
            }
            for g in self.param_groups
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step what has a gradient."""
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=True):
            group["step"] = group.get("step", 0) + 1
            for p, master in zip(group["params"], masters["params"], strict=True):
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p] = {
                        n: torch.zeros_like(p).float() for n in ("exp_avg", "exp_avg_sq")
                    }
                is_apart = self.master_weights and p.dtype != torch.bfloat16
                value = master if is_apart else p.float()
                adamw(value, p.grad.float(), self.state[p], group)
                if is_apart or value is not p:
                    p.copy_(value)


class FusedMixedPrecisionLamb(torch.optim.Optimizer):
    """As it is made; it steps copies of weights, `param_groups_full_precision`."""

    def __init__(self, params: Any, lr: float = 1e-3, reduced_precision_dtype: Any = None) -> None:
        super().__init__(params, {"lr": lr})
        self.reduced_precision_dtype = reduced_precision_dtype
        self.param_groups_full_precision: list[Any] = []


def adamw(value: Any, grad: Any, state: Any, group: Any) -> None:
    """Take a step of AdamW in fp32, in place."""
    first, second = group["betas"]
    state["exp_avg"].lerp_(grad, 1 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
    rate, step = float(group["lr"]), group["step"]
    value.mul_(1 - rate * group["weight_decay"])
    denominator = (state["exp_avg_sq"] / (1 - second**step)).sqrt_().add_(group["eps"])
    value.addcdiv_(state["exp_avg"], denominator, value=-rate / (1 - first**step))
