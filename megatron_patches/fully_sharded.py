"""What Megatron's own checkpoints lack under fully sharded data parallelism, before it loads one.

Megatron-FSDP's ranks wait for each other at a save (`keep_state_of_all`). Under FSDP2, in the form
`torch_dcp`, the loop asks the optimizer for a state to load into, which the optimizer that it has,
a chain of one, does not take: core_v0.16.1 to main of August 2026 end there in a TypeError. What is
made lacks the steps that torch's optimizers count by parameter, a KeyError where it is loaded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dsx.engines.megatron.fully_sharded import keep_state_of_all
from megatron_patches import probe


def mend_checkpoints(arguments: Any) -> None:
    """Let what Megatron saves be loaded; before a model is built."""
    if getattr(arguments, "use_megatron_fsdp", False):
        keep_state_of_all()
    if getattr(arguments, "use_torch_fsdp2", False):
        _hand_on_that_it_loads()


@functools.cache
def _hand_on_that_it_loads() -> None:
    module = probe.module("megatron.core.optimizer.optimizer")
    chain: Any = probe.function(module, "ChainedOptimizer")
    original = chain.state_dict

    @functools.wraps(original)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_loading") and len(self.chained_optimizers) == 1:
            (one,) = self.chained_optimizers
            one.init_state_fn(one.optimizer, one.config)
            _count_steps(one.optimizer)
            return one.state_dict()
        return original(self, *args, **kwargs)

    chain.state_dict = state_dict


def _count_steps(optimizer: Any) -> None:
    """Let a state that is loaded into have a number of steps, where torch's Adam has one."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        for state in optimizer.state.values():
            state.setdefault("step", torch.zeros(()))
