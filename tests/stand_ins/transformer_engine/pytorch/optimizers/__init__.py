"""FusedAdam as in Transformer Engine 2.9 (`pytorch/optimizers/fused_adam.py`): what it keeps where.

Masters are in the state, made at the first step or by `initialize_state`, and in the state dict;
what is loaded puts other tensors in their place.
"""

from __future__ import annotations

from typing import Any

import torch
from apex.optimizers import adamw  # type: ignore[import-not-found]  # of the stand-in


class FusedAdam(torch.optim.Optimizer):
    """AdamW with a step count for each group, and masters in `state[p]["master_param"]`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.store_param_remainders = store_param_remainders

    def initialize_state(self, param: Any, store_param_remainders: bool) -> None:
        """Make the state of a parameter."""
        state = {n: torch.zeros_like(param).float() for n in ("exp_avg", "exp_avg_sq")}
        if self.master_weights:
            state["master_param"] = param.clone().detach().float()
        self.state[param] = state

    def load_state_dict(self, state_dict: Any) -> None:
        """Load, all of it in fp32: torch makes it of the parameter's type."""
        super().load_state_dict(state_dict)
        held = [p for g in self.param_groups for p in g["params"]]
        for index, saved in state_dict["state"].items():
            self.state[held[index]] = {name: value.float().clone() for name, value in saved.items()}

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        """Step what has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.initialize_state(p, self.store_param_remainders)
                if p.grad is None:
                    continue
                state = self.state[p]
                is_apart = self.master_weights and p.dtype != torch.float32
                value = state["master_param"] if is_apart else p.float()
                adamw(value, p.grad.float(), state, group)
                if value is not p:
                    p.copy_(value)
