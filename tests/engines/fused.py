"""Doubles of the optimizers of apex and Transformer Engine, which need a GPU: stepped by torch.

Written from the sources of July 2026 (`apex/optimizers/fused_adam.py`) and of 2.9
(`transformer_engine/pytorch/optimizers/fused_adam.py`): they keep masters, states and steps where
those do, and their classes say that they are of those packages.
"""

from __future__ import annotations

from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


class ApexFusedAdam(torch.optim.Optimizer):
    """AdamW with a step count for each group, and masters in `param_groups_master`.

    Its kernels make fp16 weights of the masters, step fp32 masters beside fp32 parameters, and step
    bf16 parameters without their masters. Masters are in no state dict.
    """

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
                    p.detach().float().clone() if master_weights else None for p in g["params"]
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
                    self.state[p] = {name: torch.zeros_like(p).float() for name in MOMENTS}
                is_apart = self.master_weights and p.dtype != torch.bfloat16
                value = master if is_apart else p.float()
                adamw(value, p.grad.float(), self.state[p], group)
                if is_apart or value is not p:
                    p.copy_(value)


class ApexMixedPrecisionLamb(torch.optim.Optimizer):
    """As it is made; it steps copies of weights, `param_groups_full_precision`."""

    def __init__(self, params: Any, lr: float = 1e-3, reduced_precision_dtype: Any = None) -> None:
        super().__init__(params, {"lr": lr})
        self.reduced_precision_dtype = reduced_precision_dtype
        self.param_groups_full_precision: list[Any] = []


class ApexDistributedFusedLAMB(torch.optim.Optimizer):
    """As it is made; it parts masters and moments among ranks."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})


class EngineFusedAdam(torch.optim.Optimizer):
    """AdamW with a step count for each group, and masters in `state[p]["master_param"]`.

    Made at the first step or by `initialize_state`, and in the state dict; what is loaded puts
    other tensors in their place.
    """

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
        state = {name: torch.zeros_like(param).float() for name in MOMENTS}
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


class QuantizedTensor(torch.Tensor):
    """A tensor that says that it is fp32: codes inside."""


def adamw(value: Any, grad: Any, state: Any, group: Any) -> None:
    """Take a step of AdamW in fp32, in place."""
    first, second = group["betas"]
    state["exp_avg"].lerp_(grad, 1 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
    rate, step = float(group["lr"]), group["step"]
    value.mul_(1 - rate * group["weight_decay"])
    denominator = (state["exp_avg_sq"] / (1 - second**step)).sqrt_().add_(group["eps"])
    value.addcdiv_(state["exp_avg"], denominator, value=-rate / (1 - first**step))


def _say(kind: Any, name: str, module: str) -> None:
    kind.__name__, kind.__module__ = name, module


_say(ApexFusedAdam, "FusedAdam", "apex.optimizers.fused_adam")
_say(
    ApexMixedPrecisionLamb, "FusedMixedPrecisionLamb", "apex.optimizers.fused_mixed_precision_lamb"
)
_say(ApexDistributedFusedLAMB, "DistributedFusedLAMB", "apex.contrib.optimizers")
_say(EngineFusedAdam, "FusedAdam", "transformer_engine.pytorch.optimizers.fused_adam")
_say(QuantizedTensor, "QuantizedTensor", "transformer_engine.pytorch.tensor.quantized_tensor")
