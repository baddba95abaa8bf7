"""Megatron's precision-aware optimizer on a CPU: Transformer Engine's FusedAdam, by a double.

It keeps masters where the fused optimizer does (tests/engines/fused.py): in fp32, or as the 16 bits
that a bf16 weight lacks, which its kernel takes apart and puts together as is done here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.engines.fused import EngineFusedAdam, adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
VERSION = "2.9.0"
PACKAGE = "transformer_engine.pytorch.optimizers"


class PreciseFusedAdam(EngineFusedAdam):
    """AdamW of gradients beside the weights, with masters in `state[p]["master_param"]`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode and {exp_avg_dtype, exp_avg_sq_dtype} == {torch.float32}
        super().__init__(
            params, lr, betas, eps, weight_decay, master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            store_param_remainders=store_param_remainders,
        )  # fmt: skip
        self.use_decoupled_grad = use_decoupled_grad

    def initialize_state(self, param: Any, store_param_remainders: bool = False) -> None:
        """Make the state of a parameter."""
        super().initialize_state(param, store_param_remainders)
        if store_param_remainders and self.master_weights:
            self.state[param]["master_param"] = torch.zeros_like(param, dtype=torch.int16)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load, each tensor in the type it was saved in."""
        super().load_state_dict(state_dict)
        held = [p for g in self.param_groups for p in g["params"]]
        for index, saved in state_dict["state"].items():
            self.state[held[index]] = {name: value.clone() for name, value in saved.items()}

    def get_unscaled_state(self, param: Any, name: str) -> Tensor:
        """Return what is held: fp32 needs no scale."""
        return self.state[param][name]

    def set_scaled_state(self, param: Any, name: str, value: Tensor) -> None:
        """Hold a value."""
        self.state[param][name].copy_(value)

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        """Step what has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                lacks = self.store_param_remainders and p.dtype == torch.bfloat16
                if not self.state[p]:
                    self.initialize_state(p, lacks)
                grad = p.decoupled_grad if self.use_decoupled_grad else p.grad
                state = self.state[p]
                value = state["master_param"] if self.master_weights else p
                if p.dtype == torch.float32:
                    adamw(p, grad.float(), state, group)
                elif lacks:
                    put_together = joined(p, value)
                    adamw(put_together, grad.float(), state, group)
                    take_apart(put_together, p, value)
                else:
                    adamw(value, grad.float(), state, group)
                    p.copy_(value)


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master: of a weight that was rounded up, one bit less."""
    high = weight.detach().view(torch.int16).int()
    high = torch.where(remainder < 0, high - 1, high)
    low = remainder.int().remainder(1 << 16)
    return (high * (1 << 16) + low).view(torch.float32)


def take_apart(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write the upper bits, rounded, and the lower ones."""
    halves = master.view(torch.int16).view(*master.shape, 2)
    remainder.copy_(halves[..., 0])
    high = torch.where(remainder < 0, halves[..., 1] + 1, halves[..., 1])
    weight.detach().view(torch.int16).copy_(high)


@contextmanager
def fused_adam() -> Iterator[None]:
    """Let Megatron find Transformer Engine's optimizer; what it has found stays in this process."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as sharded
    import megatron.core.utils as utils

    names = ("transformer_engine", "transformer_engine.pytorch", PACKAGE)
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules[names[0]].__version__, modules[PACKAGE].FusedAdam = VERSION, PreciseFusedAdam
    sys.modules.update(modules)
    try:
        assert utils.is_te_min_version("2.1.0")
        optimizers.Adam = sharded.Adam = PreciseFusedAdam
        optimizers.USING_PYTORCH_OPTIMIZER, sharded.HAVE_APEX_OR_TE = False, True
        yield
    finally:
        for name in names:
            del sys.modules[name]


def settings_of(fused: str) -> dict[str, Any]:
    """Return an OptimizerConfig's settings: masters of Megatron, in the optimizer, remainders."""
    if fused == "plain":
        return {}
    is_short = fused == "remainders"
    return {"use_precision_aware_optimizer": True, "store_param_remainders": is_short}
