"""What ranks of a planned stage hold: weights as they are cut, and what the engine makes of them.

Names are those of a run: of slices, of experts, and of the layers of a pipeline.
"""

from __future__ import annotations

from dsx.core.types import ParameterShape, Stage
from dsx.plan import inner_memory
from dsx.plan.autotp_weights import sliced_weights
from dsx.plan.deepspeed_experts import named_as_deepspeed
from dsx.plan.deepspeed_layers import copies_on_stage, weights_of_stage
from dsx.plan.gpt_shapes import GPT, Weight
from dsx.plan.inner_memory import InnerMemory
from dsx.plan.model_files import Batch, Cluster


def stage_weights(model: GPT, cluster: Cluster, stage: Stage) -> list[Weight]:
    """Return a rank's weights of a stage, tensors whole; ValueError if they are not cut so.

    DeepSpeed's experts are those of all ranks, under their number in the layer.
    """
    if cluster.slices is not None:
        return sliced_weights(model, cluster.slices)
    if cluster.partition is not None:
        return weights_of_stage(model, stage, cluster.partition, cluster.expert)
    if cluster.zero_stage is not None:
        return named_as_deepspeed(model.weights(stage))
    return model.weights(stage, cluster.division, cluster.layers_of(model, stage.index))


def stage_shapes(model: GPT, cluster: Cluster, stage: Stage) -> list[ParameterShape]:
    """Return what the stage's ranks train together, every slice and every rank's experts apart."""
    found: list[ParameterShape] = []
    for weight in stage_weights(model, cluster, stage):
        if weight.is_expert and cluster.zero_stage is not None:
            found.append(weight.on((0, 1)))
        elif weight.is_expert:
            found += [
                weight.on((slice_number, cluster.slices_of_experts), (rank, cluster.expert))
                for rank in range(cluster.expert)
                for slice_number in range(cluster.slices_of_experts)
            ]
        else:
            slices = 1 if weight.split is None else cluster.tensor
            found += [weight.on((rank, cluster.tensor)) for rank in range(slices)]
    return found


def copies_before(model: GPT, cluster: Cluster, stage: Stage) -> list[ParameterShape]:
    """Return tied copies that lie before a stage's own weights and belong to another stage."""
    if cluster.partition is None:
        return []
    copies = copies_on_stage(model, stage, cluster.partition, cluster.expert)
    return [weight.on((0, 1)) for weight in copies]


def held_on_rank(model: GPT, cluster: Cluster, stage: Stage) -> tuple[int, int]:
    """Return the elements of dense weights, and of experts, that each rank of a stage holds.

    With a tied copy of the embedding, which the last stage does not synchronise.
    """
    dense = experts = 0
    for weight in stage_weights(model, cluster, stage):
        if weight.is_expert:
            experts += weight.on((0, cluster.slices_of_experts)).numel
        else:
            dense += weight.on((0, cluster.tensor)).numel
    if model.is_tied and 0 < stage.index == stage.count - 1:
        dense += model.vocabulary * model.hidden // cluster.tensor
    return dense, experts if cluster.zero_stage is None else experts // cluster.expert


def inner_of(model: GPT, cluster: Cluster, stage: Stage, batch: Batch) -> InnerMemory:
    """Return what the inner engine takes on a rank of a stage."""
    dense, experts = held_on_rank(model, cluster, stage)
    activations = _activations(model, cluster, stage, batch)
    if cluster.zero_stage is not None:
        is_bf16, zero, summed = cluster.is_bf16, cluster.zero_stage, cluster.accumulated
        return inner_memory.deepspeed(
            dense, is_bf16, zero, cluster.shards, activations, cluster.hpz, summed
        ) + inner_memory.deepspeed(
            experts, is_bf16, zero, cluster.shards_of_experts, accumulated=summed
        )
    shards = cluster.shards if cluster.is_sharded else 1
    shards_of_experts = cluster.shards_of_experts if cluster.is_sharded else 1
    of_dense = inner_memory.megatron(dense, cluster.is_bf16, shards, activations)
    return of_dense + inner_memory.megatron(experts, cluster.is_bf16, shards_of_experts)


def _activations(model: GPT, cluster: Cluster, stage: Stage, batch: Batch) -> int:
    layers, experts = cluster.layers_of(model, stage.index), model.experts
    routed = None
    if experts is not None and any(experts.layers[layer] for layer in layers):
        width = experts.ffn * (3 if model.is_gated else 2)
        routed = inner_memory.Routed(experts.top, width, experts.shared or 0)
    return inner_memory.recomputed_activations(
        -(-batch.sequence // cluster.context),
        batch.micro_batch,
        model.hidden,
        len(layers),
        stage.count - stage.index,
        cluster.tensor,
        cluster.is_sequence_parallel,
        routed,
    )
