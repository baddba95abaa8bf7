"""What of a DeepSpeed JSON dsx does not serve, in one table: refused before anything is built.

docs/deepspeed.md prints it (served.py). What only an engine shows is in features.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

_ON_HOST = "optimizer states may stay on the device or go to the host; use device 'cpu'"
_PLAIN = "use offload_optimizer with device 'cpu' alone"
_LIBRARY = "DeepSpeed quantizes with a CUDA operator, with which dsx was never run; leave it out"
_NATIVE = "use the data type sections 'bf16' or 'fp16', whose masters are fp32"
_FP32 = "dsx averages fp32 masters; leave it out"
BY_MPU = (
    "DeepSpeed makes sequence-parallel ranks of an mpu, and of a mesh ranks whose weights come "
    "apart, as it reduces gradients over data-parallel ones alone; use "
    "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp after its "
    "initialize_sequence_parallel, and leave it out"
)
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")


def _is_on(value: Any) -> bool:
    return bool(value)


def _is_enabled(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(cast("Mapping[str, Any]", value).get("enabled"))


def _is_nvme(value: Any) -> bool:
    return value == "nvme"


def _is_above_zero(value: Any) -> bool:
    return str(value).isdigit() and int(value) > 0  # "2" is a number to DeepSpeed


def _is_there(value: Any) -> bool:
    return True  # an empty section, too


def _is_partial(value: Any) -> bool:
    return value != 1.0


def _is_one_bit(value: Any) -> bool:
    return str(value).lower() in _ONE_BIT


@dataclass(frozen=True)
class Refusal:
    """A key of the JSON, with dots between levels; `example` is a value that is refused."""

    key: str
    example: Any
    advice: str
    is_refused: Callable[[Any], bool] = _is_on

    def found_in(self, document: Mapping[str, Any]) -> str | None:
        """Return what is refused, by name and value, if the document has it."""
        value: Any = document
        for name in self.key.split("."):
            if not isinstance(value, Mapping):
                return None
            value = cast("Mapping[str, Any]", value).get(name)
        if value is None or not self.is_refused(value):
            return None
        return self.key if isinstance(value, Mapping) else f"{self.key}={shown(value)}"


REFUSED = (
    Refusal("zero_optimization.offload_optimizer.device", "nvme", _ON_HOST, _is_nvme),
    Refusal("zero_optimization.offload_param.device", "nvme", _ON_HOST, _is_nvme),
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        0.5,
        "the whole optimizer goes to the host, or none of it; use ratio 1.0",
        _is_partial,
    ),
    Refusal("zero_optimization.offload_optimizer.super_offload", True, _PLAIN),
    Refusal("zero_optimization.zenflow", {"topk_ratio": 0.1}, _PLAIN, _is_there),
    Refusal("zero_optimization.zero_quantized_weights", True, _LIBRARY),
    Refusal("zero_optimization.zero_quantized_nontrainable_weights", True, _LIBRARY),
    Refusal("zero_optimization.zero_quantized_gradients", True, _LIBRARY),
    Refusal(
        "zero_optimization.mics_shard_size",
        2,
        "DeepSpeed 0.19.8 has no MiCS any more; use zero_hpz_partition_size, which gathers weights "
        "among as few ranks",
        _is_above_zero,
    ),
    Refusal("bf16.bf16_master_weights_and_grads", True, _FP32),
    Refusal("fp16.fp16_master_weights_and_grads", True, _FP32),
    Refusal("torch_autocast", {"enabled": True}, _NATIVE, _is_enabled),
    Refusal(
        "expert_parallel", {"enabled": True}, "use deepspeed.moe.layer.MoE for experts", _is_enabled
    ),
    Refusal("data_parallel_size", 2, BY_MPU),
    Refusal(
        "optimizer.type",
        "OneBitAdam",
        "its step compresses what ranks of a cluster send each other; use Adam or AdamW",
        _is_one_bit,
    ),
    Refusal(
        "checkpoint.use_node_local_storage", True, "ranks share a directory; leave it out"
    ),
    Refusal("compile.deepcompile", True, "use torch.compile on the model instead"),
)  # fmt: skip


def refused_settings(document: Mapping[str, Any]) -> dict[str, str]:
    """Return what of a JSON is refused, each with what to do."""
    found = {refusal.found_in(document): refusal.advice for refusal in REFUSED}
    return {name: advice for name, advice in found.items() if name is not None}


def refuse(found: Mapping[str, str]) -> None:
    """Raise ValueError for the first of what was found, with what to do."""
    for setting, advice in found.items():
        raise ValueError(f"dsx does not serve {setting} of DeepSpeed: {advice}")


def refuse_document(document: Mapping[str, Any], has_mpu: bool) -> None:
    """Raise ValueError for what of a JSON is not served, before anything is built."""
    refuse({**refused_settings(document), **refused_sequence(document, has_mpu)})


def refused_sequence(document: Mapping[str, Any], has_mpu: bool) -> dict[str, str]:
    """Return a sequence-parallel size without the mpu by which DeepSpeed makes such ranks."""
    size = document.get("sequence_parallel_size", 1)
    return {} if has_mpu or size == 1 else {f"sequence_parallel_size={size} without an mpu": BY_MPU}


def shown(value: Any) -> str:
    """Return a value as it stands in messages."""
    return repr(value) if isinstance(value, str) else json.dumps(value)
