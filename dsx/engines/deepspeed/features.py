"""What the adapter does not serve of what DeepSpeed has built; refused by name before training.

The second line: what a JSON tells is refused before anything is built (refusals.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.deepspeed.private import document_of, is_decoupled, require_names
from dsx.engines.deepspeed.refusals import (
    BY_MPU,
    refuse,
    refuse_document,
    refused_sequence,
    refused_settings,
)
from dsx.engines.inner_names import numbers_of


def refuse_unsupported(engine: Any) -> None:
    """Raise ValueError, naming the setting, what is served, and what to do.

    RuntimeError for a DeepSpeed that lacks a name which the adapter uses.
    """
    require_names()
    document = document_of(engine)
    refuse({**_refused_parallelism(engine), **refused_settings(document), **_refused(engine)})


def _refused_parallelism(engine: Any) -> dict[str, str]:
    served = "inside a cluster it serves data parallelism with ZeRO stages 0 to 3, and pipelines"
    leave = f"{served}; leave it out"
    tensor, sequence = engine.autotp_size(), engine.sequence_parallel_size
    is_pipeline = bool(engine.pipeline_parallelism)
    sliced = engine.grid.model_parallel_size if is_pipeline else engine.mp_world_size
    ranks = dist.get_world_size(engine.seq_data_parallel_group)
    has_experts = bool(engine.has_moe_layers)
    others = [n for n, size in (("AutoTP", tensor), ("sequence parallelism", sequence)) if size > 1]
    features = {
        f"a topology with {sliced} slices of each layer": (is_pipeline and sliced > 1, leave),
        f"an mpu with {sliced} slices of each layer": (
            sliced > 1 and not is_pipeline and tensor <= 1,
            f"{served}; use tensor_parallel.autotp_size, or Megatron",
        ),
        f"sequence_parallel_size={sequence} by a mesh": (
            sequence > 1 and not is_pipeline and ranks < dist.get_world_size(),
            BY_MPU,
        ),
        f"mixture of experts with {' and '.join(others)}": (
            has_experts and bool(others),
            "experts are served with data parallelism and in pipelines; use those alone",
        ),
        f"tensor_parallel.autotp_size={tensor} with sequence parallelism": (
            tensor > 1 and sequence > 1,
            "use one of them",
        ),
        f"tensor_parallel.autotp_size={tensor} with a pipeline": (
            tensor > 1 and is_pipeline,
            "use one of them",
        ),
    }
    found = {name: advice for name, (is_used, advice) in features.items() if is_used}
    return found | refused_sequence(document_of(engine), sequence > 1)


def _refused(engine: Any) -> dict[str, str]:
    import deepspeed

    found: dict[str, str] = {}
    if is_decoupled(engine):
        found["checkpoint.writer with decoupled=true"] = (
            "use a writer that is done when save_checkpoint returns"
        )
    if engine.zero_optimization_stage() == 3 and reads_before_it_has_come(
        deepspeed.__version__, dist.get_backend(), dist.get_world_size()
    ):
        found[f"ZeRO-3 on CPUs (gloo) with release {deepspeed.__version__}"] = (
            "before 0.19.8 it waits for the last of several gathers only, and trains with weights "
            "that have not come yet; install deepspeed>=0.19.8, or use stage 2"
        )
    is_flat = hasattr(engine.optimizer, "single_partition_of_fp32_groups")
    if is_flat and steps_with_autograd(deepspeed.__version__, dist.get_backend()):
        stage = engine.zero_optimization_stage()
        found[f"ZeRO-{stage} on CPUs (gloo) with release {deepspeed.__version__}"] = (
            "from 0.18.7 to 0.18.9 autograd refuses its step, as it follows the flat weights that "
            "are written there; install deepspeed>=0.19, or 0.18.6"
        )
    sums_apart = hasattr(engine.optimizer, "fp32_groups_flat_partition")
    is_late = sums_apart and not getattr(engine.optimizer, "immediate_grad_update", False)
    is_late = is_late and dist.get_world_size() > 1 and not engine.pipeline_parallelism
    if is_late and leaves_out_a_micro_batch(deepspeed.__version__):
        found[f"bf16 with data_types.grad_accum_dtype='fp32' of {deepspeed.__version__}"] = (
            "from 0.18.3 to 0.18.9 ranks do not average the last micro-batch's gradient; install "
            "deepspeed>=0.19, or leave grad_accum_dtype out"
        )
    return found


def reads_before_it_has_come(version: str, backend: str, ranks: int) -> bool:
    """Whether ZeRO-3 of a release of DeepSpeed waits for one of several gathers, as on a device.

    A device's stream ends them in their order; gloo's end in any.
    """
    return backend == "gloo" and ranks > 1 and numbers_of(version) < [0, 19, 8]


def steps_with_autograd(version: str, backend: str) -> bool:
    """Whether ZeRO-1 and 2 of a release keep flat weights that autograd follows.

    On a device collectives write past it; gloo's write through torch, which refuses.
    """
    return backend == "gloo" and [0, 18, 7] <= numbers_of(version) < [0, 19]


def leaves_out_a_micro_batch(version: str) -> bool:
    """Whether BF16_Optimizer of a release adds the last micro-batch after gradients are reduced."""
    return [0, 18, 3] <= numbers_of(version) < [0, 19]


def refuse_pipeline(model: Any, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a pipeline that is not served. Collective in the cluster."""
    refuse_sharded_pipeline(model, config)
    _refuse_uneven_experts(model)


def refuse_sharded_pipeline(model: Any, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a pipeline under ZeRO-2/3 or with AutoTP, before anything is built."""
    from deepspeed.pipe import PipelineModule

    if not isinstance(model, PipelineModule):
        return
    tensor = config.get("tensor_parallel", {}).get("autotp_size", 0)
    if tensor > 1:
        raise ValueError(
            f"tensor_parallel.autotp_size={tensor} with a PipelineModule is not served: ranks that "
            "hold slices would lie in several stages; use one of them, or Megatron"
        )
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage > 1:
        raise ValueError(
            f"zero_optimization.stage={stage} with a PipelineModule: DeepSpeed's pipelines keep "
            "all gradients of a stage until its step, which ZeRO-2 and ZeRO-3 take apart; use "
            "stage 0 or 1"
        )


def _refuse_uneven_experts(model: Any) -> None:
    """Raise ValueError for a pipeline's stages with other kinds of experts. Collective in it.

    DeepSpeed's ranks would wait for each other: each makes the groups of all ranks' experts where
    it meets the first layer of a size (deepspeed/utils/groups.py), and a stage without any none.
    """
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import PipelineModule

    if not isinstance(model, PipelineModule):
        return
    kinds = [layer.expert_group_name for layer in model.modules() if isinstance(layer, MoE)]
    everyone = gather_objects((model.stage_id, list(dict.fromkeys(kinds))))
    first = everyone[0]
    for stage, found in everyone:
        if found != first[1]:
            raise ValueError(
                f"experts in a pipeline: stage {first[0]} has layers of {first[1] or 'no experts'}"
                f", stage {stage} of {found or 'no experts'}, where DeepSpeed waits forever, as it "
                "makes the experts' groups on all ranks together; give every stage a layer of "
                "experts with the same ep_size (partition_method cuts the stages)"
            )


def refuse_arguments(document: Mapping[str, Any], mpu: Any, has_training_data: bool) -> None:
    """Raise ValueError for a JSON, or an mpu, that is not served, before anything is built."""
    refuse_document(document, mpu is not None)
    refuse_mpu(mpu, has_training_data)


def refuse_mpu(mpu: Any, has_training_data: bool) -> None:
    """Raise ValueError for an mpu that is not one of sequence parallelism, or reads no data."""
    if mpu is None:
        return
    if not hasattr(mpu, "get_sequence_data_parallel_group"):
        raise ValueError(
            f"dsx.initialize(mpu={_name(mpu)}) is not served: of an mpu dsx serves sequence "
            "parallelism (it has get_sequence_data_parallel_group, as deepspeed.runtime."
            "sequence_parallel.parallel_state_sp); leave it out, or use tensor_parallel.autotp_size"
        )
    if has_training_data and not hasattr(mpu, "get_data_parallel_world_size"):
        raise ValueError(
            f"training_data with mpu={_name(mpu)}: DeepSpeed asks an mpu for "
            "get_data_parallel_world_size and get_data_parallel_rank, by which it deals samples, "
            "and this one has none; give it both, or leave training_data out and read with a "
            "loader of your own: a DistributedSampler over data-parallel ranks, of "
            "dsx.data.ClusterShard"
        )


def _name(mpu: Any) -> str:
    return str(getattr(mpu, "__name__", type(mpu).__name__))
