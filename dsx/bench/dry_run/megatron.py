"""Build ranks of a Megatron cluster: megatron-core's own model, wrapper and optimizer, on fakes.

Layers are megatron-core's local ones. Transformer Engine's hold the same parameters, with the norms
inside the linear layers. Sequence parallelism is left out of what is built: it cuts activations,
and the norms that megatron-core has without Transformer Engine refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsx.bench.dry_run.built_rank import BuiltRank
from dsx.bench.dry_run.stand_in import Answers, in_cluster, no_memory
from dsx.bench.megatron_on_cpu import install
from dsx.config.schema import DsxConfig
from dsx.core.types import Stage
from dsx.plan.gpt_shapes import GPT
from dsx.plan.model_files import Batch, Cluster


def build_rank(
    model: GPT, cluster: Cluster, batch: Batch, config: DsxConfig, rank: int
) -> BuiltRank:
    """Return one rank of a cluster, built; ValueError for what dsx does not serve."""
    install()
    from megatron.core import parallel_state

    from dsx.engines.megatron.engine import MegatronAdapter

    with in_cluster(rank, cluster.ranks, _answers(model, cluster)):
        try:
            parallel_state.initialize_model_parallel(
                cluster.tensor, cluster.pipeline, create_gloo_process_groups=False
            )
            method, is_on_host = config.method, config.state.is_on_host
            with no_memory():
                chunk, optimizer = _build(model, cluster, batch)
                backwards = method.schedule.backwards
                adapter = MegatronAdapter(
                    [chunk], optimizer, method.fragments, is_on_host, backwards
                )
            _require_place(adapter.coordinates, cluster, rank)
            return BuiltRank(
                rank,
                adapter.stage,
                sum(p.numel() for p in chunk.parameters()),
                adapter.fragments,
                [len(parameters) for parameters in adapter.fragment_parameters],
                adapter.buffer_bytes,
            )
        finally:
            parallel_state.destroy_model_parallel()


def ranks_of_stage(cluster: Cluster, stage: int) -> list[int]:
    """Return the ranks of a pipeline stage in Megatron's order: tensor, data, pipeline."""
    together = cluster.tensor * cluster.data
    return list(range(stage * together, (stage + 1) * together))


def _answers(model: GPT, cluster: Cluster) -> Answers:
    """Return what the others say: their places, and whether they hold the tied embedding."""
    from dsx.engines.megatron.parameters import Coordinates

    def place(rank: int) -> Coordinates:
        tensor, data, pipeline = cluster.tensor, cluster.data, cluster.pipeline
        return Coordinates(
            (rank % tensor, tensor),
            (rank // (tensor * data), pipeline),
            (rank // tensor % data, data),
        )

    def holds_copy(rank: int) -> bool:
        stage, count = place(rank).pipeline
        return model.is_tied and 0 < stage == count - 1

    def answer(own: Any, ranks: Sequence[int]) -> list[Any]:
        if isinstance(own, Coordinates):
            return [place(rank) for rank in ranks]
        if isinstance(own, tuple) and own and isinstance(own[0], Coordinates):
            return [(place(rank), holds_copy(rank)) for rank in ranks]
        return [own for _ in ranks]  # all have the same model, cut alike

    return answer


def _require_place(found: Any, cluster: Cluster, rank: int) -> None:
    number = found.tensor[0] + cluster.tensor * found.data[0]
    number += cluster.tensor * cluster.data * found.pipeline[0]
    assert number == rank, f"Megatron's order of ranks is another: {found} is rank {rank}"


def _build(model: GPT, cluster: Cluster, batch: Batch) -> tuple[Any, Any]:
    """Return this rank's model chunk, wrapped, and the optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = _transformer_config(model, cluster)
    default = torch.get_default_dtype()
    torch.set_default_dtype(config.params_dtype)  # fakes cannot be converted later on
    try:
        module = _gpt(model, config, batch)
    finally:
        torch.set_default_dtype(default)
    is_sharded = cluster.is_sharded
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded
    )
    chunk = DistributedDataParallel(config, ddp, module)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=cluster.is_bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=is_sharded,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [chunk], use_gloo_process_groups=False)
    return chunk, optimizer


def _gpt(model: GPT, config: Any, batch: Batch) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    state: Any = parallel_state
    stage = Stage(
        state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=model.vocabulary,
        max_sequence_length=model.positions or batch.sequence,
        pre_process=stage.index == 0,
        post_process=stage.index == stage.count - 1,
        share_embeddings_and_output_weights=model.is_tied,
        position_embedding_type="rope" if model.positions is None else "learned_absolute",
    )


def _transformer_config(model: GPT, cluster: Cluster) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if cluster.is_bf16 else torch.float32
    activation = torch.nn.functional.silu if model.is_gated else torch.nn.functional.gelu
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        ffn_hidden_size=model.ffn,
        tensor_model_parallel_size=cluster.tensor,
        pipeline_model_parallel_size=cluster.pipeline,
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
    )
