"""Fully sharded data parallelism in Megatron: torch's FSDP2, and Megatron-FSDP.

Under FSDP2 (`TorchFullyShardedDataParallel`) parameters and fp32 copies of them are DTensors: a
rank's masters are its rows of each (data_parallel.py), and what is used next is gathered by itself.

Megatron-FSDP keeps the fp32 weights of a group of parameters in a row, of which every rank has a
range that cuts through parameters. Its optimizer steps DTensors over these ranges; in the model
they stand in the parameters' places between a step and the next forward, and the parameters behind
them are `orig_param`. By those dsx knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dsx.engines.data_parallel import (
    drop_gathered,
    is_dtensor,
    piece_of_shard,
    sharded_modules,
)
from dsx.engines.masters import Piece

_OF_MEGATRON = "megatron.core.distributed.fsdp."  # up to core 0.13 another one, elsewhere


def is_megatron_fsdp(chunk: Any) -> bool:
    """Whether a chunk is wrapped by the Megatron-FSDP of core 0.14 and later."""
    kind = type(chunk)  # whose first version has that in its name from core 0.20 on
    name = kind.__name__.removesuffix("V1")
    return name == "FullyShardedDataParallel" and kind.__module__.startswith(_OF_MEGATRON)


def own(parameter: Any) -> Any:
    """Return the model's parameter, where a shard of Megatron-FSDP stands in its place."""
    return getattr(parameter, "orig_param", parameter)


def drop_gathered_of(chunks: Sequence[Any]) -> bool:
    """Let chunks under FSDP2 hold their shards alone; return whether there are any. Local."""
    modules = [module for chunk in chunks for module in sharded_modules(chunk)]
    drop_gathered(modules)
    return bool(modules)


def pieces_of(parameter: Any, master: Any) -> list[tuple[Any, Piece]]:
    """Return what of a parameter's master is on this rank, if anything is: rows under FSDP2."""
    piece = Piece(master, tuple(parameter.shape))
    if is_dtensor(master):
        piece = piece_of_shard(f"of {tuple(parameter.shape)}", master)
    return [(parameter, piece)] if piece.numel else []


def end_gathers(chunk: Any) -> None:
    """Wait for what Megatron-FSDP gathers of weights, which are of before. All ranks call it."""
    pipeline = chunk.module.all_gather_pipeline
    for key in list(pipeline.param_gather_event_map):  # up to core 0.15 a bucket, then a pair
        pipeline.wait_bucket_ready(*(key if isinstance(key, tuple) else (key,)))
    chunk.module.synchronize_param_gather()


@cache
def keep_state_of_all() -> None:
    """Let torch's optimizers have state of Megatron-FSDP's parameters on every rank; once.

    A rank that holds no element of a parameter gets no gradient of it from Megatron, and torch's
    optimizers have no state without; yet all ranks gather for each state in a checkpoint, and
    would wait for each other. Before Megatron loads, as it makes the state that is loaded into by
    a step. What is trained is the same to the bit.
    """
    register_optimizer_step_pre_hook(_give_empty_gradients)


def _give_empty_gradients(optimizer: Any, *_: Any) -> None:
    if not type(optimizer).__module__.startswith("torch.optim."):
        return  # whose kernels may not take what is empty
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            is_shard = hasattr(parameter, "orig_param") and is_dtensor(parameter)
            if is_shard and parameter.grad is None and not parameter.to_local().numel():
                parameter.grad = torch.zeros_like(parameter)
