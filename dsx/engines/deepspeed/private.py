"""What dsx takes from inside DeepSpeed: every private name that it touches is in this file.

`require_names` looks for them before an engine is built; where each came from was read in the
releases 0.12.0 to 0.19.5, and run in those of docs/compatibility.md. What an optimizer wrapper
keeps its masters in is known in masters.py, by attributes that have no underscore.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from dsx.engines.inner_names import InnerName, KnownReleases

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_GROUPS = "deepspeed.utils.groups"
NAMES = (
    InnerName(_ENGINE, "_take_model_step", "dsx counts steps"),
    InnerName(_ENGINE, "_copy_recovery_script", "a full disk is an error of all ranks"),
    InnerName(_ENGINE, "autotp_size", "slices of AutoTP are known", "0.16.4"),
    InnerName(_ZERO_3, "_partition_all_parameters", "ZeRO-3 gathers what dsx has written"),
    InnerName(
        _ZERO_3, "_reassign_or_swap_out_partitioned_parameters", "ZeRO-3's bit16 shards follow"
    ),
    InnerName(_ZERO_3, "invalidate_secondary_tensor", "hpZ gathers what dsx has written"),
    InnerName(_GROUPS, "_get_expert_data_parallel_group", "experts are averaged"),
    InnerName(_GROUPS, "_get_expert_parallel_group", "experts are counted"),
    InnerName(_GROUPS, "get_tensor_model_parallel_group", "slices are counted", "0.16.4"),
    InnerName("deepspeed.ops", "__compatible_ops__", "a start without a GPU builds no C++"),
    InnerName("deepspeed.runtime.pipe.module", "TiedLayerSpec", "tied layers are found"),
    InnerName("deepspeed.runtime.zero.utils", "ZeRORuntimeException", "a failing load says why"),
)
RELEASES = KnownReleases("DeepSpeed", "0.12.0", "0.19.8", "install deepspeed>=0.17,<0.20")


@cache
def require_names() -> None:
    """Raise RuntimeError where the DeepSpeed that is installed lacks a name of the table."""
    import deepspeed

    RELEASES.require(NAMES, deepspeed.__version__)


def document_of(engine: Any) -> Mapping[str, Any]:
    """Return the JSON that an engine was made of, with its "dsx" block."""
    return engine._config._param_dict


def replace_step(engine: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `around(take)` where the engine takes a step at the end of its micro-batches."""
    engine._take_model_step = around(engine._take_model_step)


@contextmanager
def replaced_copy_of_script(
    engine: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Generator[None, None, None]:
    """Replace, inside, what writes `zero_to_fp32.py` beside a checkpoint."""
    engine._copy_recovery_script = around(engine._copy_recovery_script)
    try:
        yield
    finally:
        del engine._copy_recovery_script  # the class has it


def copy_sub_group(wrapper: Any, index: int) -> None:
    """Copy a sub-group's masters to their bit16 shards, as ZeRO-3 does after its step. Local."""
    wrapper._reassign_or_swap_out_partitioned_parameters(index)


def let_go_of_gathered(wrapper: Any) -> None:
    """Have ZeRO-3 forget what it holds gathered, hpZ's second copy, too: it is of before."""
    wrapper._partition_all_parameters()
    wrapper.invalidate_secondary_tensor()


def layers_of(pipeline: Any) -> list[Any]:
    """Return the layers of a `PipelineModule` as they were given, of all stages."""
    return pipeline._layer_specs


def expert_data_parallel_group(name: str) -> Any:
    """Return the group of the ranks that hold the same experts, by DeepSpeed's name of it."""
    from deepspeed.utils import groups

    module: Any = groups
    return module._get_expert_data_parallel_group(name)


def expert_parallel_group(name: str) -> Any:
    """Return the group of the ranks among which experts are divided, by DeepSpeed's name of it."""
    from deepspeed.utils import groups

    module: Any = groups
    return module._get_expert_parallel_group(name)


def leave_out_shared_memory() -> None:
    """Let DeepSpeed do without its shared-memory collective, which a first start would build."""
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


def is_decoupled(engine: Any) -> bool:
    """Whether the engine's checkpoint writer goes on behind a save; none did before 0.17.1."""
    ask = getattr(engine.checkpoint_engine, "is_decoupled", None)
    return bool(ask and ask())
