"""What a plan is told of a tiny Megatron model, and of a cluster of so many ranks."""

from __future__ import annotations

from dsx.plan.gpt_shapes import GPT, Experts
from dsx.plan.model_files import Cluster
from dsx.plan.pipeline_split import PipelineSplit
from tests.engines import megatrons
from tests.engines.megatron_experts import TOP
from tests.engines.megatron_families import GROUPED, TRANSFORMERS
from tests.engines.megatrons import Kind


def planned(kind: Kind, ranks: int) -> tuple[GPT, Cluster]:
    family = TRANSFORMERS[kind.family]
    experts = None
    if kind.experts:
        has = tuple(layer % 2 == 1 for layer in range(kind.num_layers))
        experts = Experts(kind.experts, kind.ffn, TOP, has, kind.ffn)
    heads = 2 * megatrons.HEADS if kind.family in GROUPED else megatrons.HEADS
    model = GPT(
        kind.num_layers, megatrons.HIDDEN, kind.ffn, heads,
        family.get("num_query_groups", heads), megatrons.VOCAB,
        None if kind.family in GROUPED else megatrons.LENGTH,
        is_gated=family.get("gated_linear_unit", False),
        has_bias=not kind.experts and family.get("add_bias_linear", True),
        has_qkv_bias=family.get("add_qkv_bias", False),
        is_rms_norm=family.get("normalization") == "RMSNorm",
        is_tied=kind.is_tied,
        channels=family.get("kv_channels"),
        has_qk_norm=family.get("qk_layernorm", False),
        experts=experts,
    )  # fmt: skip
    cluster = Cluster(
        pipeline=kind.pipeline,
        tensor=kind.tensor,
        data=ranks // (kind.pipeline * kind.tensor * kind.context),
        is_bf16=kind.precision == "bf16",
        is_sharded=kind.is_sharded,
        context=kind.context,
        expert=kind.expert_parallel,
        expert_tensor=kind.expert_tensor,
        split=PipelineSplit(kind.chunks, kind.first_stage),
    )
    return model, cluster
