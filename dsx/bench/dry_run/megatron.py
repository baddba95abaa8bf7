"""Build ranks of a Megatron cluster: megatron-core's own model, wrapper and optimizer, on fakes.

Layers are megatron-core's local ones, experts one after another. Transformer Engine's hold the same
parameters, with the norms inside the linear layers and each expert's own matrices in grouped GEMM.
Sequence parallelism is left out of what is built: it cuts activations, and the norms that
megatron-core has without Transformer Engine refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsx.bench.dry_run.built_rank import BuiltRank
from dsx.bench.dry_run.stand_in import Answers, in_cluster, no_memory
from dsx.bench.megatron_on_cpu import install
from dsx.config.schema import DsxConfig
from dsx.plan.gpt_shapes import GPT
from dsx.plan.model_files import Batch, Cluster


def build_rank(
    model: GPT, cluster: Cluster, batch: Batch, config: DsxConfig, rank: int
) -> BuiltRank:
    """Return one rank of a cluster, built; ValueError for what dsx does not serve."""
    install()
    from megatron.core import parallel_state

    from dsx.engines.megatron.engine import MegatronAdapter

    cluster.layers(model)  # refused in our words
    with in_cluster(rank, cluster.ranks, _answers(model, cluster)):
        try:
            parallel_state.initialize_model_parallel(
                cluster.tensor,
                cluster.pipeline,
                cluster.split.chunks if cluster.split.chunks > 1 else None,
                context_parallel_size=cluster.context,
                expert_model_parallel_size=cluster.expert,
                expert_tensor_parallel_size=cluster.slices_of_experts,
                create_gloo_process_groups=False,
            )
            method, is_on_host = config.method, config.state.is_on_host
            with no_memory():
                chunks, optimizer = _build(model, cluster, batch)
                backwards = method.schedule.backwards
                adapter = MegatronAdapter(
                    chunks, optimizer, method.fragments, is_on_host, backwards
                )
            assert adapter.coordinates == _place(cluster, rank), (
                f"Megatron's order of ranks is another: {adapter.coordinates} is rank {rank}"
            )
            return BuiltRank(
                rank,
                adapter.stage,
                sum(p.numel() for chunk in chunks for p in chunk.parameters()),
                adapter.fragments,
                [len(parameters) for parameters in adapter.fragment_parameters],
                adapter.buffer_bytes,
            )
        finally:
            parallel_state.destroy_model_parallel()


def ranks_of_stage(cluster: Cluster, stage: int) -> list[int]:
    """Return the ranks of a pipeline stage in Megatron's order: tensor, context, data, pipeline."""
    together = cluster.ranks_per_stage
    return list(range(stage * together, (stage + 1) * together))


def _place(cluster: Cluster, rank: int) -> Any:
    """Return where a rank is, as its adapter reads it from Megatron."""
    from dsx.engines.megatron.parameters import Coordinates

    stage, number = divmod(rank, cluster.ranks_per_stage)
    tensor, context, slices = cluster.tensor, cluster.context, cluster.slices_of_experts
    return Coordinates(
        (number % tensor, tensor),
        (stage, cluster.pipeline),
        (number // (tensor * context), cluster.data),
        (number // tensor % context, context),
        (number // slices % cluster.expert, cluster.expert),
        (number % slices, slices),
        (number // (slices * cluster.expert), cluster.shards_of_experts),
    )


def _answers(model: GPT, cluster: Cluster) -> Answers:
    """Return what the others say: their places, and whether they hold the tied embedding."""
    from dsx.engines.megatron.parameters import Coordinates

    def holds_copy(rank: int) -> bool:
        stage, count = _place(cluster, rank).pipeline
        return model.is_tied and 0 < stage == count - 1

    def answer(own: Any, ranks: Sequence[int]) -> list[Any]:
        if isinstance(own, Coordinates):
            return [_place(cluster, rank) for rank in ranks]
        if isinstance(own, tuple) and own and isinstance(own[0], Coordinates):
            return [(_place(cluster, rank), holds_copy(rank)) for rank in ranks]
        return [own for _ in ranks]  # all have the same model, cut alike

    return answer


def _build(model: GPT, cluster: Cluster, batch: Batch) -> tuple[list[Any], Any]:
    """Return this rank's model chunks, wrapped, and the optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = _transformer_config(model, cluster)
    default = torch.get_default_dtype()
    torch.set_default_dtype(config.params_dtype)  # fakes cannot be converted later on
    try:
        modules = [_gpt(model, config, cluster, batch, i) for i in range(cluster.split.chunks)]
    finally:
        torch.set_default_dtype(default)
    is_sharded = cluster.is_sharded
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded
    )
    chunks: list[Any] = [
        DistributedDataParallel(config, ddp, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=cluster.is_bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=is_sharded,
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)
    return chunks, optimizer


def _gpt(model: GPT, config: Any, cluster: Cluster, batch: Batch, chunk: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    state: Any = parallel_state
    stage, chunks = state.get_pipeline_model_parallel_rank(), cluster.split.chunks
    virtual = chunk if chunks > 1 else None
    return GPTModel(
        config,
        _layers(config, virtual),
        vocab_size=model.vocabulary,
        max_sequence_length=model.positions or batch.sequence,
        pre_process=stage == chunk == 0,
        post_process=stage == cluster.pipeline - 1 and chunk == chunks - 1,
        share_embeddings_and_output_weights=model.is_tied,
        position_embedding_type="rope" if model.positions is None else "learned_absolute",
        vp_stage=virtual,
    )


class _Attention(torch.nn.Module):
    """In place of Transformer Engine's, which a cut sequence needs: neither has parameters."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()


def _layers(config: Any, virtual: int | None) -> Any:
    """Return the specification of a chunk's layers."""
    from megatron.core.models.gpt import gpt_layer_specs

    spec: Any = gpt_layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        vp_stage=virtual,
    )
    if config.context_parallel_size > 1:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _Attention
    return spec


def _transformer_config(model: GPT, cluster: Cluster) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if cluster.is_bf16 else torch.float32
    activation = torch.nn.functional.silu if model.is_gated else torch.nn.functional.gelu
    split = cluster.split
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.channels,
        qk_layernorm=model.has_qk_norm,
        ffn_hidden_size=model.ffn,
        tensor_model_parallel_size=cluster.tensor,
        pipeline_model_parallel_size=cluster.pipeline,
        virtual_pipeline_model_parallel_size=split.chunks if split.chunks > 1 else None,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        account_for_embedding_in_pipeline_split=split.counts_embedding,
        account_for_loss_in_pipeline_split=split.counts_loss,
        context_parallel_size=cluster.context,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=cluster.is_bf16,
        normalization="RMSNorm" if model.is_rms_norm else "LayerNorm",
        gated_linear_unit=model.is_gated,
        activation_func=activation,
        add_bias_linear=model.has_bias,
        add_qkv_bias=model.has_qkv_bias,
        use_cpu_initialization=True,  # marks slices as such without random states of a device
        # what would need apex or Transformer Engine
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **_of_experts(model, cluster),
    )


def _of_experts(model: GPT, cluster: Cluster) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.top,
        "moe_layer_freq": [int(has) for has in experts.layers],
        "moe_shared_expert_intermediate_size": experts.shared,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "expert_model_parallel_size": cluster.expert,
        "expert_tensor_parallel_size": cluster.slices_of_experts,
        "moe_token_dispatcher_type": "alltoall",
    }
