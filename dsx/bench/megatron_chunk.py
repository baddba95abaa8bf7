"""What `megatron.training` makes of a model: chunks that reduce gradients, and their Adam.

Imports nothing of dsx; megatron-core is imported by the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_CLIP = 1.0


def chunk_and_optimizer(
    config: Any, model: Any, rate: float, decay: float, is_sharded: bool = False
) -> tuple[Any, Any]:
    """Return a model under Megatron's DDP, and its optimizer: the distributed one if `is_sharded`.

    `config` is the model's TransformerConfig; it learns what a schedule asks of it.
    """
    (chunk,), optimizer = chunks_and_optimizer(config, [model], rate, decay, is_sharded)
    return chunk, optimizer


def chunks_and_optimizer(
    config: Any, models: Sequence[Any], rate: float, decay: float, is_sharded: bool = False
) -> tuple[list[Any], Any]:
    """Return the virtual stages of a rank as `chunk_and_optimizer` does, and one optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    of_gradients = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded
    )
    chunks: list[Any] = [
        DistributedDataParallel(config, of_gradients, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam", lr=rate, weight_decay=decay, clip_grad=_CLIP, bf16=config.bf16,
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        use_distributed_optimizer=is_sharded,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, chunks)
    for group in optimizer.param_groups:  # what Megatron's scheduler does at every step
        group["lr"], group["weight_decay"] = rate, decay * group["wd_mult"]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer
