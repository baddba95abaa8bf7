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
from typing import Any

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
