"""How a DeepSpeed JSON cuts a cluster, as far as the formulas go; what lies beyond is refused.

A pipeline is told as `"pipeline": {"stages": 4, "partition": "parameters"}`, and the ranks that
experts lie over as `"moe": {"ep_size": 8}`, keys that DeepSpeed takes and does not read: a run
gives them to its `PipelineModule`, as `num_stages` and `partition_method`, and to its `MoE` layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dsx.plan.autotp_rules import Slices, read_slices
from dsx.plan.deepspeed_layers import METHODS


class DeepSpeedCut(NamedTuple):
    """One cluster: pipeline stages and how they are cut (None: no pipeline), and ranks of each.

    `zero_stage` is by which masters are shared: 1 where a bf16 pipeline has ZeRO-0, whose optimizer
    shares them, too. `context` are sequence-parallel ranks, `hpz` the ranks that keep a second copy
    of ZeRO-3's weights among them (1: none), `accumulated` the bytes of an element in which
    gradients are summed beside those of a micro-batch (0: they are not). `tensor` ranks have
    `slices` of AutoTP's; a layer's experts lie over `expert` ranks, next to each other, or, with
    `has_data_before_experts`, those that hold the same ones are.
    """

    zero_stage: int
    is_bf16: bool
    pipeline: int
    partition: str | None
    data: int
    context: int
    hpz: int
    accumulated: int
    tensor: int = 1
    slices: Slices | None = None
    expert: int = 1
    has_data_before_experts: bool = False


def read_cut(document: Mapping[str, Any], ranks: int) -> DeepSpeedCut:
    """Read a JSON; ValueError for what the formulas do not know, and what does not go together."""
    zero = _section(document, "zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        device = _section(zero, key).get("device", "none")
        if device != "none":
            raise ValueError(
                f"zero_optimization.{key}.device={device!r}: dsx memory knows inner states on the "
                f"accelerator only; leave {key} out to see what it would take there"
            )
    slices = read_slices(_section(document, "tensor_parallel"))
    tensor = 1 if slices is None else slices.ranks
    stage = read_integer(zero, "stage", 0)
    pipeline, partition = _pipeline(document, stage)
    context = read_integer(document, "sequence_parallel_size", 1)
    expert = read_integer(_section(document, "moe"), "ep_size", 1)
    sizes = {
        "tensor_parallel.autotp_size": tensor,
        "sequence_parallel_size": context,
        "pipeline.stages": pipeline,
        "moe.ep_size": expert,
    }
    _refuse_together(sizes)
    for name, size in sizes.items():
        _require_multiple(ranks // pipeline if name == "moe.ep_size" else ranks, name, size)
    hpz = read_integer(zero, "zero_hpz_partition_size", 1)
    if hpz > 1 and stage != 3:
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size={hpz} with stage {stage}: it is a second "
            "copy of ZeRO-3's weights; use stage 3, or leave it out"
        )
    _require_multiple(ranks, "zero_optimization.zero_hpz_partition_size", hpz)
    is_bf16, is_fp16 = (bool(_section(document, k).get("enabled")) for k in ("bf16", "fp16"))
    accumulated = _accumulated(document, is_bf16, stage, partition is not None)
    return DeepSpeedCut(
        zero_stage=stage or int(accumulated > 0),
        is_bf16=is_bf16 or is_fp16,
        pipeline=pipeline,
        partition=partition,
        data=ranks // (pipeline * context * tensor),
        context=context,
        hpz=hpz,
        accumulated=accumulated,
        tensor=tensor,
        slices=slices,
        expert=expert,
        has_data_before_experts=bool(document.get("use_data_before_expert_parallelism")),
    )


def _refuse_together(sizes: Mapping[str, int]) -> None:
    """Raise ValueError for two cuts of a cluster that a run refuses, too."""
    used = {name: size for name, size in sizes.items() if size > 1}
    allowed = {"pipeline.stages", "moe.ep_size"}
    if len(used) > 1 and set(used) != allowed:
        first, second = list(used)[:2]
        raise ValueError(
            f"{first}={used[first]} with {second}={used[second]} is not served; use one of them"
        )


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return what is under a key, {} without it; ValueError where that is no object."""
    section: Any = document.get(key)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{key}={section!r} must be an object, as in DeepSpeed's JSON: {{...}}")
    return section


def read_integer(section: Mapping[str, Any], key: str, default: int) -> int:
    """Return a number of a section; ValueError where another kind of value stands there."""
    value = section.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be an integer; write the number of the planned run")
    return value


def _accumulated(
    document: Mapping[str, Any], is_bf16: bool, zero_stage: int, is_pipeline: bool
) -> int:
    """Return the bytes of an element in which DeepSpeed's BF16_Optimizer sums gradients, else 0."""
    kind = _section(document, "data_types").get("grad_accum_dtype")
    if kind is None:
        return 2 if is_bf16 and is_pipeline and zero_stage == 0 else 0
    if kind == "fp32" and is_bf16 and zero_stage == 1:
        return 4
    raise ValueError(
        f"data_types.grad_accum_dtype={kind!r}: dsx memory knows DeepSpeed's default, and fp32 "
        "with bf16 and ZeRO-1; leave it out, and add the difference"
    )


def _pipeline(document: Mapping[str, Any], zero_stage: int) -> tuple[int, str | None]:
    """Return the stages, and by what they are cut."""
    section = _section(document, "pipeline")
    if section.get("stages", "auto") in ("auto", None):
        return 1, None
    stages = read_integer(section, "stages", 1)
    if stages <= 1:
        return 1, None
    if zero_stage > 1:
        raise ValueError(
            f"pipeline.stages={stages} with zero_optimization.stage={zero_stage}: DeepSpeed's "
            "pipelines go with ZeRO-0 and ZeRO-1; use stage 0 or 1"
        )
    partition = section.get("partition", METHODS[0])
    if partition not in METHODS:
        raise ValueError(
            f"pipeline.partition={partition!r}: dsx cuts the layers of a plan by "
            f"{', '.join(METHODS)}; write one of them, as partition_method is in the run"
        )
    return stages, partition


def _require_multiple(ranks: int, name: str, size: int) -> None:
    if size < 1 or ranks % size:
        of = "stage" if name == "moe.ep_size" else "cluster"
        raise ValueError(
            f"{name}={size} does not divide the {ranks} ranks of a {of}; use a divisor of them"
        )
