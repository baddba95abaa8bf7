"""`fully_shard` on CPUs with torch 2.6, which has it for accelerators alone.

Its streams of a CPU record no events, it asks gloo for a mean, which gloo of that release does not
form, and gathered weights count as changed where they are gathered again. Later releases need
nothing.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor


def serve_fsdp2() -> None:
    """Let this process's `fully_shard` train on the CPU, over gloo, whichever torch it is."""
    stream: Any = torch.cpu.Stream
    if hasattr(stream, "record_event"):
        return
    stream.record_event = lambda self: torch.cpu.Event()
    stream.wait_event = lambda self, event: None
    name = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
    collectives: Any = importlib.import_module(name)
    collectives._get_gradient_divide_factors = _sum_then_divide
    operators: Any = torch.ops.fsdp
    copy = operators.split_with_sizes_copy

    def copy_unseen(gathered: Tensor, sizes: list[int], dim: int, out: list[Tensor]) -> None:
        with ExitStack() as kept:
            for part in out:
                kept.enter_context(torch.autograd._unsafe_preserve_version_counter(part))
            copy(gathered, sizes, dim=dim, out=out)

    operators.split_with_sizes_copy = copy_unseen


def _sum_then_divide(shards: Any, copies: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Return what gradients are divided by before they are summed up, and after."""
    return 1.0, float(shards.size() * (copies.size() if copies is not None else 1))
