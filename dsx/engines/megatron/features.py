"""What of Megatron the adapter does not serve, refused by name before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from dsx.engines.megatron.masters import leaves

_TYPES = {
    "LayerWiseDistributedOptimizer": "use adam or sgd, with or without use_distributed_optimizer",
    "HybridDeviceOptimizer": "leave optimizer_cpu_offload out",
    "TensorParallelMuon": "use adam or sgd",
}


def refuse_unsupported(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raise ValueError, naming the setting and what to do."""
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
    _refuse(found)


def refuse_arguments(arguments: Any) -> None:
    """Raise ValueError for arguments of Megatron's training loop that act outside of its model.

    `arguments` is Megatron-LM's namespace; what a version does not have is not asked for.
    """
    one_size = "samples are counted per cluster with one batch size; use --global-batch-size"
    reasons = {
        "optimizer_cuda_graph": "it would capture the outer step; leave it out",
        "inprocess_restart": "its restart ends the process groups between clusters; leave it out",
        "use_torch_fsdp2": "use the distributed optimizer",
        "use_megatron_fsdp": "use the distributed optimizer",
        "use_custom_fsdp": "use the distributed optimizer",
        "hybrid_context_parallel": "its sampler is not split between clusters; leave it out",
        "non_persistent_save_interval": "outer state needs persistent checkpoints; leave it out",
        "rampup_batch_size": one_size,
        "step_batch_size_schedule": one_size,
        "skip_train": "there is nothing to synchronise; start the script without dsx",
    }
    given = {name: getattr(arguments, name, None) for name in reasons}
    _refuse({_flag(name): reasons[name] for name, value in given.items() if value})


def _refuse(found: Mapping[str, str]) -> None:
    for setting, advice in found.items():
        raise ValueError(f"dsx does not serve {setting} of Megatron: {advice}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refused_types(chunks: Sequence[Any], optimizer: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for leaf in [optimizer, *leaves(optimizer)]:
        for one in (leaf, getattr(leaf, "optimizer", None)):
            name = type(one).__name__
            if name in _TYPES:
                found[name] = _TYPES[name]
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            kind = f"a model chunk of type {type(chunk).__name__}"
            found[kind] = "wrap it in megatron.core.distributed.DistributedDataParallel"
    return found


def _refused_parallelism(chunks: Sequence[Any]) -> dict[str, str]:
    experts = "only dense layers are known"
    found: dict[str, str] = {}
    for chunk in chunks:
        config = chunk.config
        context, expert = (
            config.context_parallel_size,
            config.expert_model_parallel_size,
        )
        settings = {
            f"context_parallel_size={context}": (context > 1, "leave it out"),
            f"expert_model_parallel_size={expert}": (expert > 1, experts),
            f"num_moe_experts={config.num_moe_experts}": (bool(config.num_moe_experts), experts),
            f"mtp_num_layers={getattr(config, 'mtp_num_layers', None)}": (
                bool(getattr(config, "mtp_num_layers", None)),
                "multi-token prediction has further copies of the embedding; leave it out",
            ),
        }
        found |= {name: advice for name, (is_used, advice) in settings.items() if is_used}
    return found


def _refused_ddp(config: Any) -> dict[str, str]:
    instances = getattr(config, "num_distributed_optimizer_instances", 1)
    fsdp = "use the distributed optimizer"
    reasons = {
        "use_megatron_fsdp": fsdp,
        "use_custom_fsdp": fsdp,
        "reuse_grad_buf_for_mxfp8_param_ag": "leave it out",
        "fp8_param_gather": "use bf16 parameters; fp8 in the layers is no matter",
    }
    found = {f"{n}=True": why for n, why in reasons.items() if getattr(config, n, False)}
    if instances > 1:
        name = f"num_distributed_optimizer_instances={instances}"
        found[name] = "it reduces over instances at every step; use 1"
    return found


def _refused_optimizer(config: Any) -> dict[str, str]:
    reasons = {
        "use_precision_aware_optimizer": "its masters are in the fused optimizer; leave it out",
        "overlap_param_gather_with_optimizer_step": (
            "it gathers weights before the outer step; use overlap_param_gather"
        ),
        "optimizer_cpu_offload": "leave it out",
        "optimizer_cuda_graph": "it would capture the outer step; leave it out",
        "reuse_grad_buf_for_mxfp8_param_ag": "leave it out",
    }
    found = {f"{n}=True": why for n, why in reasons.items() if getattr(config, n, False)}
    kind = getattr(config, "optimizer", "adam")
    if kind not in ("adam", "sgd"):
        found[f"optimizer={kind!r}"] = "use 'adam' or 'sgd'"
    return found
