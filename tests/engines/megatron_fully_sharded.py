"""Chunks of Megatron under fully sharded data parallelism, and what lies in their shards."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class NoLayer:
    """What no layer is of."""


def fully_sharded(kind: Any, config: Any, module: Any) -> Any:
    """Return a chunk under torch's FSDP2, or under Megatron-FSDP with a kind's strategy."""
    from megatron.core.distributed import (
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallel,
    )
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.torch_fully_sharded_data_parallel_config import (
        TorchFullyShardedDataParallelConfig,
    )

    if kind.fsdp == "torch":
        take_gradients_as_later_releases_do(TorchFullyShardedDataParallel)
        settings = TorchFullyShardedDataParallelConfig()
        return TorchFullyShardedDataParallel(config, settings, module)
    settings = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=kind.fsdp,
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=kind.overlaps,
        overlap_param_gather=kind.overlaps,
        gradient_reduce_div_fusion=False,  # it is in NCCL
        bucket_size=1000,  # elements: several of them
    )
    have_no_layers_of_transformer_engine()
    return mcore_fsdp_adapter.FullyShardedDataParallel(config, settings, module)


def have_no_layers_of_transformer_engine() -> None:
    """Let Megatron-FSDP look for such layers among slices, where its class of them is a mock."""
    with contextlib.suppress(ImportError):  # of core 0.13 and before
        from megatron.core.distributed.fsdp import mcore_fsdp_adapter

        mcore_fsdp_adapter.TELinear = NoLayer


def take_gradients_as_later_releases_do(kind: Any) -> None:
    """Let core 0.16 to 0.19 train under FSDP2: NVIDIA/Megatron-LM#4669, mended by #4953."""
    kind.finish_grad_sync = lambda self, force_all_reduce=False: None


def with_shards(chunk: Any) -> Any:
    """Return a chunk, whose shards stand in its parameters' places."""
    if hasattr(chunk, "param_and_grad_buffer"):
        chunk.module._replace_param_with_distributed_if_needed()
    return chunk


def gathered(parameter: Any) -> Tensor:
    """Return this rank's slice of a parameter, from the shards of all data-parallel ranks."""
    if not hasattr(parameter, "orig_param"):
        return parameter.full_tensor()
    whole = parameter.orig_param
    is_expert = not getattr(whole, "allreduce", True)
    group = parameter.megatron_fsdp_dist_index.get_dp_group(is_expert_parallel=is_expert)
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, parameter.to_local().detach().view(-1).clone(), group=group)
    return torch.cat(parts).view(whole.shape)


def difference_in_buffers(chunk: Any) -> float:
    """How far the weights that Megatron-FSDP gathers from are from its rounded masters."""
    worst = 0.0
    for group in chunk.param_and_grad_buffer.parameter_groups:
        held, masters = group.model_weight_buffer, group.main_weight_buffer
        for item in range(len(group.params)):
            weight, master = (b.get_item(item, only_shard=True) for b in (held, masters))
            if weight.numel():
                worst = max(worst, (weight - master.to(weight.dtype)).abs().max().item())
    return worst
