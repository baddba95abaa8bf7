"""What dsx takes from inside megatron-core, looked for before anything is attached.

The names that are not meant for others are used in masters.py alone. Where each came from was read
in the trees core_v0.8.0 to core_v0.19.0 and main of August 2026.
"""

from __future__ import annotations

from functools import cache

from dsx.engines.inner_names import InnerName, KnownReleases, numbers_of

_FP16 = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
_SHARDS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_STATE = "megatron.core.parallel_state"
_DDP = "megatron.core.distributed:DistributedDataParallel"
_GATHERED = "the distributed optimizer's weights are gathered"
_EXPERTS = "experts are told apart"
NAMES = (
    InnerName(_FP16, "_copy_main_params_to_model_params", "weights follow their masters"),
    InnerName(_SHARDS, "_copy_main_params_to_model_params", "weights follow their masters"),
    InnerName(_SHARDS, "_get_model_param_range_map", "a rank's part of a parameter is known"),
    InnerName(_DDP, "start_param_sync", _GATHERED, "0.9.0"),
    InnerName(_STATE, "get_expert_tensor_parallel_rank", _EXPERTS, "0.11.0"),
    InnerName(_STATE, "get_expert_data_parallel_group", _EXPERTS, "0.11.0"),
    InnerName(_STATE, "get_expert_data_parallel_world_size", _EXPERTS, "0.12.0"),
    InnerName(
        "megatron.core.num_microbatches_calculator", "get_num_microbatches", "batches are counted"
    ),
)
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_BUFFERS = f"{_FSDP}.param_and_grad_buffer"
_RANGES = "a rank's ranges under Megatron-FSDP are known"
_BEFORE = "what was gathered before an outer step is not used"
OF_FSDP = (
    InnerName(f"{_BUFFERS}:DataParallelBuffer", "_get_item_slice_in_shard", _RANGES, "0.14.0"),
    InnerName(f"{_BUFFERS}:DataParallelBuffer", "_get_item_local_shard_index", _RANGES, "0.14.0"),
    InnerName(f"{_BUFFERS}:AllGatherPipeline", "wait_bucket_ready", _BEFORE, "0.14.0"),
    InnerName(f"{_FSDP}.megatron_fsdp:MegatronFSDP", "synchronize_param_gather", _BEFORE, "0.14.0"),
)
RELEASES = KnownReleases("megatron-core", "0.8.0", "0.19.0", "install megatron-core>=0.13,<0.20")


@cache
def require_names() -> None:
    """Raise RuntimeError where the megatron-core that is imported lacks a name of the table."""
    import numpy

    version = _version()
    RELEASES.require(NAMES, version)
    if is_before(0, 16) and not hasattr(numpy, "product"):
        raise RuntimeError(
            f"megatron-core {version} asks numpy for a name that numpy {numpy.__version__} has not "
            "(numpy.product) when it saves: install numpy<2, or megatron-core>=0.16"
        )


@cache
def require_names_of_fsdp() -> None:
    """As `require_names`, of what a model under Megatron-FSDP takes."""
    RELEASES.require(OF_FSDP, _version())


def is_before(*release: int) -> bool:
    """Whether the megatron-core that is imported is older than a release."""
    return numbers_of(_version()) < [*release]


def _version() -> str:
    import megatron.core

    return str(getattr(megatron.core, "__version__", "of unknown version"))
