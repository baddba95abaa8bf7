"""What of Megatron is not served, by its settings: known from arguments, before anything is built.

The same settings are looked for again in the configurations of what has been built (features.py),
where a script on megatron-core has no such arguments. Needs no megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsx.config.checkpoints import REMOTE
from dsx.config.schema import ConfigError, DsxConfig

OLD_FSDP = "use_custom_fsdp"
_BUFFER = "leave it out"
LAYER_WISE = (
    "its masters are parted among ranks by layer; use optimizer 'muon' without "
    "use_distributed_optimizer, or 'adam' with it"
)
INSIDE_OF_BOTH = "its masters would be in the optimizer; leave the latter out"
OF_OPTIMIZER = {
    "overlap_param_gather_with_optimizer_step": (
        "it gathers weights before the outer step; use overlap_param_gather"
    ),
    "optimizer_cpu_offload": "leave it out",
    "optimizer_cuda_graph": "it would capture the outer step; leave it out",
    "reuse_grad_buf_for_mxfp8_param_ag": _BUFFER,
    "use_layer_wise_distributed_optimizer": LAYER_WISE,
}
OF_DATA_PARALLEL = {
    OLD_FSDP: "it is of core 0.13 and before; use the distributed optimizer",
    "reuse_grad_buf_for_mxfp8_param_ag": _BUFFER,
    "fp8_param_gather": "use bf16 parameters; fp8 in the layers is no matter",
}
ABOVE_ONE = {
    "num_distributed_optimizer_instances": "it reduces over instances at every step; use 1",
}
UNDER_MEGATRON_FSDP = {
    "pipeline_model_parallel_size": "its mesh has no stages (_get_dp_tp_mesh in Megatron's "
    "mcore_fsdp_adapter.py); use the distributed optimizer",
}
UNDER_FSDP = {  # torch's
    name: f"Megatron refuses it itself (arguments.py); {advice}"
    for name, advice in {
        "pipeline_model_parallel_size": "use the distributed optimizer",
        "expert_model_parallel_size": "use Megatron-FSDP or the distributed optimizer",
    }.items()
}
SHARDING_GRADIENTS = ("optim_grads", "optim_grads_params")
SHARDING = ("optim", *SHARDING_GRADIENTS)
NOT_LOADED = (  # core_v0.16.1 to main of August 2026
    "Megatron finds an optimizer's parameters by what to_local() returns, a new tensor each time "
    "from torch 2.13 on, and loads no DTensors in this format; use --ckpt-format torch_dcp"
)
NOT_MADE = "Megatron makes no state of it to load into; use --optimizer adam"
WAITS = (
    "a rank that holds nothing of a parameter has no state of it in fused optimizers but "
    "Transformer Engine's Adam, and the others wait for it there until "
    "--distributed-timeout-minutes; use --optimizer adam, and Transformer Engine beside apex"
)
OF_MODEL = {
    "hybrid_context_parallel": "its sampler is not split between clusters; leave it out",
}
EXPERT_TENSOR = "another size needs --expert-model-parallel-size above 1"
OPTIMIZERS = ("adam", "sgd", "muon")
OTHER_OPTIMIZER = "use 'adam', 'sgd' or 'muon'"
OF_LOOP = {
    "inprocess_restart": "its restart ends the process groups between clusters; leave it out",
    "non_persistent_save_interval": "outer state needs persistent checkpoints; leave it out",
    "skip_train": "there is nothing to synchronise; start the script without dsx",
}


def refuse_arguments(arguments: Any) -> None:
    """Raise ValueError for arguments of Megatron's training loop that dsx does not serve.

    `arguments` is Megatron-LM's namespace; what a version does not have is not asked for.
    """
    reasons = {**OF_LOOP, **OF_OPTIMIZER, **OF_MODEL}
    found = {name: why for name, why in reasons.items() if getattr(arguments, name, None)}
    found |= refused_of_data_parallel(arguments)
    named = {flag_of(name): why for name, why in found.items()}
    named |= {f"{flag_of(n)} {v}": why for n, (v, why) in refused_strategy(arguments).items()}
    above = above_one(arguments, ABOVE_ONE) | refused_under_fsdp(arguments)
    named |= {f"{flag_of(n)} {v}": why for n, (v, why) in above.items()}
    named |= refused_checkpoints(arguments)
    both = ("use_megatron_fsdp", "use_precision_aware_optimizer")
    if all(getattr(arguments, name, False) for name in both):
        named[" with ".join(flag_of(name) for name in both)] = INSIDE_OF_BOTH
    kind = getattr(arguments, "optimizer", None) or "adam"
    if kind not in OPTIMIZERS:
        named[f"--optimizer {kind}"] = LAYER_WISE if kind == "dist_muon" else OTHER_OPTIMIZER
    elif kind == "muon" and getattr(arguments, "use_distributed_optimizer", False):
        named["--use-distributed-optimizer with --optimizer muon"] = LAYER_WISE
    scalars = getattr(arguments, "muon_scalar_optimizer", None) or "adam"
    if kind == "muon" and scalars not in OPTIMIZERS:
        named[f"--muon-scalar-optimizer {scalars}"] = "use 'adam'"
    named |= {flag_of(name): why for name, why in refused_experts(arguments, "num_experts").items()}
    refuse(named)


def refused_of_data_parallel(settings: Any) -> dict[str, str]:
    """Return what of OF_DATA_PARALLEL is set; later releases set the old FSDP with the new one."""
    is_new = getattr(settings, "use_megatron_fsdp", False)
    return {
        name: why
        for name, why in OF_DATA_PARALLEL.items()
        if getattr(settings, name, False) and not (is_new and name == OLD_FSDP)
    }


def refused_strategy(settings: Any) -> dict[str, tuple[str, str]]:
    """Return how Megatron-FSDP shards, where it does not: setting, value and what to do."""
    name = "data_parallel_sharding_strategy"
    value = getattr(settings, name, None)
    if not getattr(settings, "use_megatron_fsdp", False) or value != "no_shard":
        return {}
    advice = f"with Megatron-FSDP use {', '.join(SHARDING)}, or leave use_megatron_fsdp out"
    return {name: (value, advice)}


def above_one(settings: Any, reasons: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Return what is set above 1 of what has a reason against it: its value and that."""
    given = {name: getattr(settings, name, None) or 1 for name in reasons}
    return {name: (value, reasons[name]) for name, value in given.items() if value > 1}


def refused_under_fsdp(arguments: Any) -> dict[str, tuple[int, str]]:
    """Return what is above 1 where data parallelism is fully sharded: its value and what to do."""
    kinds = {"use_torch_fsdp2": UNDER_FSDP, "use_megatron_fsdp": UNDER_MEGATRON_FSDP}
    reasons = next((kinds[kind] for kind in kinds if getattr(arguments, kind, False)), {})
    return {
        name: (value, f"with fully sharded data parallelism use 1: {why}")
        for name, (value, why) in above_one(arguments, reasons).items()
    }


def refused_checkpoints(arguments: Any) -> dict[str, str]:
    """Return flags by which a fully sharded optimizer would be saved or loaded, where it is not.

    Such a run would end, or its ranks wait for each other, at the first save.
    """

    def has(name: str) -> bool:
        return bool(getattr(arguments, name, None))

    kind, why = "", ""
    if has("use_torch_fsdp2") and getattr(arguments, "ckpt_format", None) == "torch_dist":
        kind, why = "--use-torch-fsdp2 and --ckpt-format torch_dist", NOT_LOADED
    optimizer = getattr(arguments, "optimizer", None) or "adam"
    if has("use_torch_fsdp2") and optimizer != "adam":
        kind, why = f"--use-torch-fsdp2 and --optimizer {optimizer}", NOT_MADE
    # Transformer Engine's Adam has state of all, and torch's are given it (fully_sharded.py)
    is_of_all = optimizer == "adam" if _is_found("transformer_engine") else not _is_found("apex")
    if has("use_megatron_fsdp") and not is_of_all:
        kind, why = f"--use-megatron-fsdp and --optimizer {optimizer}", WAITS
    without = {"save": ("no_save_optim",), "load": ("no_load_optim", "finetune")}
    return {
        f"{flag_of(name)} with {kind}": f"{why}, or for weights alone {flag_of(flags[0])}"
        for name, flags in without.items()
        if kind and has(name) and not any(map(has, flags))
    }


def _is_found(package: str) -> bool:
    """Whether Megatron finds a package, whose optimizers it takes; it is not imported here."""
    try:
        return find_spec(package) is not None
    except ValueError:  # imported, and made without a spec
        return True


def refused_experts(settings: Any, count: str = "num_moe_experts") -> dict[str, str]:
    """Return what of a layout of experts is refused, by its setting; `count` names their number.

    Without expert parallelism, experts that several tensor-parallel ranks hold whole drift apart:
    megatron-core takes them for dense, and sums their gradients over data-parallel ranks alone.
    """

    def size(name: str) -> int:
        return getattr(settings, f"{name}_parallel_size", None) or 1

    own = getattr(settings, "expert_tensor_parallel_size", None) or size("tensor_model")
    is_parted = not getattr(settings, count, None) or size("expert_model") > 1
    if is_parted or own == size("tensor_model"):
        return {}
    advice = f"use {size('tensor_model')}, as for dense layers; {EXPERT_TENSOR}"
    return {f"expert_tensor_parallel_size {own} where every rank holds all experts": advice}


def refuse_backend(wanted: str | None, made: str) -> None:
    """Raise ValueError if Megatron is told another backend than the cluster's world has."""
    if wanted is not None and wanted != made:
        raise ValueError(
            f"--distributed-backend {wanted}, but this cluster's world runs on {made}, which dsx "
            "chooses by the hardware (nccl where there is CUDA, else gloo); give that one"
        )


def captured_by(settings: Any) -> str | None:
    """Return the setting by which a backward is captured as a CUDA graph, if it is.

    `settings` are Megatron-LM's arguments, or a chunk's configuration.
    """
    for name in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"):
        value = getattr(settings, name, None)
        if value and value != "none":
            return f"{name}={value!r}"
    return None


def refuse(found: Mapping[str, str]) -> None:
    """Raise ValueError for the first setting that was found, with what to do."""
    for setting, advice in found.items():
        raise ValueError(f"dsx does not serve {setting} of Megatron: {advice}")


def flag_of(name: str) -> str:
    """Return an argument's flag on Megatron-LM's command line."""
    return f"--{name.replace('_', '-')}"


def refuse_settings(settings: DsxConfig, own_part: str | Path | None) -> None:
    """Raise ConfigError for keys that a run with Megatron does not serve.

    `own_part`: where Megatron's own checkpoints are, as far as that is known.
    """
    if settings.checkpoints.remote is not None and own_part is None:
        raise ConfigError(
            f"{REMOTE}={settings.checkpoints.remote!r} copies Megatron's own part with the outer "
            "state, and this run has not said where that is: give --save, or in a loop of your own "
            "dsx.attach_megatron(own_part=DIRECTORY), or leave it out"
        )
    if settings.divergence.max_rollbacks:
        raise ConfigError(
            f"dsx.divergence.max_rollbacks={settings.divergence.max_rollbacks} is not served with "
            "Megatron, whose loop counts iterations and samples itself: leave it out; a run that "
            "has diverged ends, and the next start takes the last good checkpoint"
        )
