"""What `megatron.training` makes of a model: a chunk that reduces gradients, and its Adam.

Imports nothing of dsx; megatron-core is imported by the call.
"""

from __future__ import annotations

from typing import Any

import torch

_CLIP = 1.0


def chunk_and_optimizer(
    config: Any, model: Any, rate: float, decay: float, is_sharded: bool = False
) -> tuple[Any, Any]:
    """Return a model under Megatron's DDP, and its optimizer: the distributed one if `is_sharded`.

    `config` is the model's TransformerConfig; it learns what a schedule asks of it.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    of_gradients = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded
    )
    chunk = DistributedDataParallel(config, of_gradients, model)
    chunk.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam", lr=rate, weight_decay=decay, clip_grad=_CLIP, bf16=config.bf16,
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        use_distributed_optimizer=is_sharded,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [chunk])
    for group in optimizer.param_groups:  # what Megatron's scheduler does at every step
        group["lr"], group["weight_decay"] = rate, decay * group["wd_mult"]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return chunk, optimizer
