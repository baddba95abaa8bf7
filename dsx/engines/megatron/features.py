"""What of Megatron the adapter does not serve, in what has been built; refused before training.

The second line: what arguments tell is refused before anything is built (refusals.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel

from dsx.engines.megatron.fully_sharded import is_megatron_fsdp
from dsx.engines.megatron.masters import leaves
from dsx.engines.megatron.private import is_before, require_names
from dsx.engines.megatron.refusals import (
    ABOVE_ONE,
    LAYER_WISE,
    OF_MODEL,
    OF_OPTIMIZER,
    OPTIMIZERS,
    OTHER_OPTIMIZER,
    SHARDING_GRADIENTS,
    UNDER_FSDP,
    UNDER_MEGATRON_FSDP,
    above_one,
    refuse,
    refused_experts,
    refused_of_data_parallel,
    refused_strategy,
)

_TYPES = {
    "LayerWiseDistributedOptimizer": LAYER_WISE,
    "HybridDeviceOptimizer": "leave optimizer_cpu_offload out",
}


def refuse_unsupported(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raise ValueError, naming the setting and what to do.

    RuntimeError for a megatron-core that lacks a name which the adapter uses.
    """
    require_names()
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "megatron.core.parallel_state is not initialized, where dsx reads the ranks from; "
            "call parallel_state.initialize_model_parallel first"
        )
    found = {**_refused_types(chunks, optimizer), **_refused_parallelism(chunks)}
    for part in [chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")]:
        found |= _refused_ddp(part)
    for leaf in [optimizer, *leaves(optimizer)]:
        found |= _refused_optimizer(getattr(leaf, "config", None))
    refuse(found)


def _refused_types(chunks: Sequence[Any], optimizer: Any) -> dict[str, str]:
    held = leaves(optimizer)  # whose chain has no one optimizer inside
    inside = [getattr(leaf, "optimizer", None) for leaf in held]
    kinds = [type(one).__name__ for one in (optimizer, *held, *inside)]
    found = {name: _TYPES[name] for name in kinds if name in _TYPES}
    for chunk in chunks:
        known = (DistributedDataParallel, TorchFullyShardedDataParallel)
        if not isinstance(chunk, known) and not is_megatron_fsdp(chunk):
            found[f"a model chunk of type {type(chunk).__name__}"] = (
                "wrap it in DistributedDataParallel or TorchFullyShardedDataParallel of "
                "megatron.core.distributed, or in Megatron-FSDP's FullyShardedDataParallel"
            )
    return found


def _refused_parallelism(chunks: Sequence[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for chunk in chunks:
        found |= {
            f"{name}={getattr(chunk.config, name)}": why
            for name, why in OF_MODEL.items()
            if getattr(chunk.config, name, None)
        }
        found |= _above_one(chunk.config, ABOVE_ONE) | refused_experts(chunk.config)
        if not isinstance(chunk, DistributedDataParallel):
            is_torch = isinstance(chunk, TorchFullyShardedDataParallel)
            found |= _above_one(chunk.config, UNDER_FSDP if is_torch else UNDER_MEGATRON_FSDP)
            found |= {} if is_torch else _refused_groups_of_one(chunk)
    return found


def _refused_groups_of_one(chunk: Any) -> dict[str, str]:
    """Return a group of one rank over which Megatron-FSDP of before 0.17 would shard gradients.

    `GradReducePipeline._bucket_group_gradient_reduce` then adds to a group's gradients, at every
    micro-batch, what it has of them: they are those of no batch.
    """
    settings = getattr(chunk, "ddp_config", None)
    strategy = getattr(settings, "data_parallel_sharding_strategy", "")
    if strategy not in SHARDING_GRADIENTS or not is_before(0, 17):
        return {}
    sizes = {"data": parallel_state.get_data_parallel_world_size(with_context_parallel=True)}
    if getattr(chunk.config, "num_moe_experts", None):
        sizes["expert-data"] = parallel_state.get_expert_data_parallel_world_size()
    return {
        f"data_parallel_sharding_strategy={strategy!r} over a {kind}-parallel rank alone": (
            "megatron-core before 0.17 sums its gradients once more at every micro-batch; use "
            "'optim', several ranks, or a later release"
        )
        for kind, size in sizes.items()
        if size == 1
    }


def _above_one(config: Any, reasons: Mapping[str, str]) -> dict[str, str]:
    return {f"{n}={value}": why for n, (value, why) in above_one(config, reasons).items()}


def _refused_ddp(config: Any) -> dict[str, str]:
    found = {f"{n}=True": why for n, why in refused_of_data_parallel(config).items()}
    found |= {f"{n}={v!r}": why for n, (v, why) in refused_strategy(config).items()}
    return found | _above_one(config, ABOVE_ONE)


def _refused_optimizer(config: Any) -> dict[str, str]:
    found = {f"{n}=True": why for n, why in OF_OPTIMIZER.items() if getattr(config, n, False)}
    kind = getattr(config, "optimizer", "adam")
    if kind not in OPTIMIZERS:
        found[f"optimizer={kind!r}"] = OTHER_OPTIMIZER
    scalars = getattr(config, "muon_scalar_optimizer", None) or "adam"
    if scalars not in OPTIMIZERS:
        found[f"muon_scalar_optimizer={scalars!r}"] = "use 'adam'"
    return found
