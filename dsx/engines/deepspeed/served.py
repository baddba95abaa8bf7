"""What of DeepSpeed's layouts and settings is served, and what is refused, in one table.

docs/deepspeed.md prints it, and tests hold both halves to what is refused (refusals.py). Needs no
deepspeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsx.engines.deepspeed.refusals import REFUSED, shown


@dataclass(frozen=True)
class Served:
    """A setting, or an argument of `dsx.initialize`; `document` is a JSON that has it, if any."""

    name: str
    values: str
    note: str
    document: dict[str, Any]


SERVED = (
    Served(
        "zero_optimization.stage", "0, 1, 2, 3", "pipelines 0 and 1, experts 0 to 2",
        {"zero_optimization": {"stage": 3}},
    ),
    Served("bf16", "served", "or no data type: fp32", {"bf16": {"enabled": True}}),
    Served(
        "fp16", "served", "a step that overflows counts", {"fp16": {"enabled": True}},
    ),
    Served(
        "zero_optimization.offload_optimizer.device", "`cpu`", "",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}},
    ),
    Served(
        "zero_optimization.offload_param.device", "`cpu`", "with ZeRO-3",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    ),
    Served(
        "zero_optimization.zero_hpz_partition_size", "served",
        "the second copy of the weights is made anew after every sync",
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    ),
    Served("PipelineModule", "served", "every stage decides as one; with data parallelism", {}),
    Served(
        "mpu", "sequence parallelism",
        "Ulysses: a group's ranks read the same samples and hold the same parameters; "
        "not with experts or AutoTP",
        {},
    ),
    Served(
        "deepspeed.moe.layer.MoE", "served",
        "each expert by the ranks that hold it, under its number in the layer; with data "
        "parallelism, and in pipelines all of whose stages have experts",
        {},
    ),
    Served(
        "tensor_parallel.autotp_size", "served",
        "slices of one size, each a parameter of its own; with data parallelism",
        {"tensor_parallel": {"autotp_size": 2}},
    ),
)  # fmt: skip


def table() -> list[tuple[str, str, str]]:
    """Return rows: a setting, whether it is served, and what to know or do."""
    rows = [(one.name, one.values, one.note) for one in SERVED]
    for refusal in REFUSED:
        is_value = not isinstance(refusal.example, (bool, dict))
        name = f"{refusal.key}={shown(refusal.example)}" if is_value else refusal.key
        rows.append((name, "refused", refusal.advice))
    return rows
