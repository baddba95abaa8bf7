"""What of DeepSpeed's configuration the adapter does not serve, refused by name before training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def refuse_unsupported(engine: Any) -> None:
    """Raise ValueError, naming the setting, what is served, and what to do."""
    for setting, advice in {**_refused_parallelism(engine), **_refused_zero(engine)}.items():
        raise ValueError(f"dsx does not serve {setting} of DeepSpeed: {advice}")
    if not hasattr(engine, "_take_model_step"):
        raise RuntimeError(
            f"this DeepSpeed has no {type(engine).__name__}._take_model_step, the step boundary "
            "that dsx counts; use a version that pyproject.toml names"
        )


def _refused_parallelism(engine: Any) -> dict[str, str]:
    served = "inside a cluster it serves data parallelism with ZeRO stages 0 to 3, and pipelines"
    tensor, sequence = engine.autotp_size(), engine.sequence_parallel_size
    is_pipeline = bool(engine.pipeline_parallelism)
    sliced = engine.grid.model_parallel_size if is_pipeline else engine.mp_world_size
    features = {
        f"a topology with {sliced} slices of each layer": is_pipeline and sliced > 1,
        f"tensor_parallel.autotp_size={tensor}": tensor > 1 or (sliced > 1 and not is_pipeline),
        f"sequence_parallel_size={sequence}": sequence > 1,
        "mixture of experts": bool(engine.has_moe_layers),
    }
    return {name: f"{served}; leave it out" for name, used in features.items() if used}


def _refused_zero(engine: Any) -> dict[str, str]:
    import deepspeed

    zero = engine._config.zero_config
    on_host = "optimizer states may stay on the device or go to the host; use device 'cpu'"
    native = "use the data type sections 'bf16' or 'fp16', whose masters are fp32"
    stage_3 = "use stage 3 without it"
    whole = "the whole optimizer goes to the host, or none of it; use ratio 1.0"
    plain = "use offload_optimizer with device 'cpu' alone"
    found: dict[str, str] = {}
    for part in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, part)
        if offload is not None and offload.device == "nvme":
            found[f"zero_optimization.{part}.device='nvme'"] = on_host
    optimizer = zero.offload_optimizer
    if optimizer is not None and optimizer.ratio != 1.0:
        found[f"zero_optimization.offload_optimizer.ratio={optimizer.ratio}"] = whole
    if optimizer is not None and getattr(optimizer, "super_offload", False):
        found["zero_optimization.offload_optimizer.super_offload=true"] = plain
    if zero.zenflow is not None:
        found["zero_optimization.zenflow"] = plain
    if zero.zero_hpz_partition_size > 1:
        size = zero.zero_hpz_partition_size
        found[f"zero_optimization.zero_hpz_partition_size={size}"] = stage_3
    for key in ("weights", "nontrainable_weights", "gradients"):
        if getattr(zero, f"zero_quantized_{key}"):
            found[f"zero_optimization.zero_quantized_{key}=true"] = stage_3
    if engine.checkpoint_engine.is_decoupled():
        found["checkpoint.writer with decoupled=true"] = (
            "use a writer that is done when save_checkpoint returns"
        )
    if engine.use_node_local_storage():
        found["checkpoint.use_node_local_storage=true"] = "ranks share a directory; leave it out"
    if engine.torch_autocast_enabled():
        found["torch_autocast"] = native
    if engine.zero_optimization_stage() == 3 and reads_before_it_has_come(
        deepspeed.__version__, dist.get_backend(), dist.get_world_size()
    ):
        found[f"ZeRO-3 on CPUs (gloo) with release {deepspeed.__version__}"] = (
            "before 0.19.8 it waits for the last of several gathers only, and trains with weights "
            "that have not come yet; install deepspeed>=0.19.8, or use stage 2"
        )
    if engine.is_deepcompile_enabled():
        found["compile.deepcompile=true"] = "use torch.compile on the model instead"
    return found


def reads_before_it_has_come(version: str, backend: str, ranks: int) -> bool:
    """Whether ZeRO-3 of a release of DeepSpeed waits for one of several gathers, as on a device.

    A device's stream ends them in their order; gloo's end in any.
    """
    numbers = [int(number) for number in re.findall(r"\d+", version)[:3]]
    return backend == "gloo" and ranks > 1 and numbers < [0, 19, 8]


def refuse_sharded_pipeline(model: Any, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a pipeline under ZeRO-2/3, before DeepSpeed's own assertion."""
    from deepspeed.pipe import PipelineModule

    stage = config.get("zero_optimization", {}).get("stage", 0)
    if isinstance(model, PipelineModule) and stage > 1:
        raise ValueError(
            f"zero_optimization.stage={stage} with a PipelineModule: DeepSpeed's pipelines keep "
            "all gradients of a stage until its step, which ZeRO-2 and ZeRO-3 take apart; use "
            "stage 0 or 1"
        )
