"""A model and how one cluster is cut, out of Megatron's flags or a DeepSpeed JSON.

What plans start from: sizes, shapes, and what the inner engine takes of them. Shapes are formulas
(gpt_shapes.py), not those of a library's model on the meta device, which would need torch.
"""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from dsx.config.files import ConfigError, read_json, read_text
from dsx.core.types import ParameterShape, Stage
from dsx.method.method import Method
from dsx.method.schedule.inside_backward import require_before, require_hooks
from dsx.plan import inner_memory
from dsx.plan.deepspeed_json import read_cut, read_integer
from dsx.plan.deepspeed_layers import copies_on_stage, layers_of_stage, weights_of_stage
from dsx.plan.gpt_shapes import GPT, Division, Weight
from dsx.plan.inner_memory import InnerMemory
from dsx.plan.megatron_flags import model_of, parse, split_of
from dsx.plan.pipeline_split import Layers, PipelineSplit


@dataclass(frozen=True)
class Cluster:
    """How one cluster is cut. `zero_stage` None: Megatron; `is_sharded`: its optimizer state is."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    is_bf16: bool = True
    is_sharded: bool = True
    zero_stage: int | None = None
    is_sequence_parallel: bool = False
    captured_by: str | None = None  # the flag by which Megatron makes a CUDA graph of the backward
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # as `tensor`
    split: PipelineSplit = PipelineSplit()
    partition: str | None = None  # by what DeepSpeed cuts a pipeline; None: Megatron's, or none
    hpz: int = 1  # ranks that keep a second copy of ZeRO-3's weights among them
    accumulated: int = 0  # bytes of an element in which DeepSpeed sums bf16 gradients beside them

    @property
    def engine(self) -> str:
        """The inner engine's name."""
        return "Megatron" if self.zero_stage is None else "DeepSpeed"

    @property
    def ranks(self) -> int:
        """Accelerators of one cluster."""
        return self.pipeline * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """Accelerators of one pipeline stage."""
        return self.tensor * self.shards

    @property
    def shards(self) -> int:
        """Ranks that hold the same dense weights: of the same tensor slice, whatever they read."""
        return self.data * self.context

    @property
    def slices_of_experts(self) -> int:
        """Tensor-parallel ranks of one expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def shards_of_experts(self) -> int:
        """Ranks that hold the same experts: expert-data-parallel ones."""
        return self.ranks_per_stage // (self.expert * self.slices_of_experts)

    @property
    def division(self) -> Division:
        """Over how many ranks weights are cut."""
        return Division(self.tensor, self.expert, self.slices_of_experts)

    def layers(self, model: GPT) -> Layers:
        """Return the numbers of the layers by stage and chunk; ValueError if they do not divide."""
        return self.split.layers(model.layers, self.pipeline)

    def layers_of(self, model: GPT, stage: int) -> list[int]:
        """Return the numbers of a stage's layers, of all its chunks."""
        if self.partition is not None:
            layers = layers_of_stage(model, Stage(stage, self.pipeline), self.partition)
            return [one.transformer for _, one in layers if one.transformer is not None]
        return [layer for chunk in self.layers(model)[stage] for layer in chunk]

    def __str__(self) -> str:
        """Return how it is cut, as it is shown."""
        parts = [f"tensor {self.tensor}", f"pipeline {self.pipeline}", f"data {self.data}"]
        if self.partition is not None:
            parts[1] += f" by {self.partition}"
        if self.split.chunks > 1:
            parts.append(f"{self.split.chunks} virtual stages of each rank")
        parts += [f"context {self.context}"] if self.context > 1 else []
        parts += [f"hpZ {self.hpz}"] if self.hpz > 1 else []
        if self.expert > 1:
            of_experts = f"expert {self.expert}, expert tensor {self.slices_of_experts}, "
            parts.append(f"{of_experts}expert data {self.shards_of_experts}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Batch:
    """What activations depend on, and how many sequences a step of one cluster has, if given."""

    sequence: int
    micro_batch: int
    sequences_per_step: int | None = None


@dataclass(frozen=True)
class ModelFiles:
    """What the files say of the model and of one cluster."""

    model: GPT
    cluster: Cluster
    batch: Batch

    @property
    def micro_batches(self) -> int:
        """Of one step of a rank; 1 if they are not told."""
        together = self.batch.micro_batch * self.cluster.data
        return max(1, (self.batch.sequences_per_step or 1) // together)


def read_model(source: Path, model_flags: Path | None, ranks: int | None) -> ModelFiles:
    """Read a file of Megatron flags, or a DeepSpeed JSON beside one for the model.

    ValueError for what is missing or does not go together.
    """
    if source.suffix != ".json":
        if model_flags is not None:
            raise ValueError("--model goes with a DeepSpeed JSON; a file of flags tells the model")
        known = parse(read_words(source))
        return ModelFiles(model_of(known), _megatron(known, ranks), _batch(known))
    if model_flags is None or ranks is None:
        raise ValueError(
            f"{source} does not tell the model nor the ranks of a cluster: add --model FILE (with "
            "Megatron's flags for its sizes) and their number"
        )
    known = parse(read_words(model_flags))
    if known.num_experts is not None:
        raise ValueError(
            f"--num-experts={known.num_experts} with a DeepSpeed JSON: a run trains with experts, "
            "and dsx plans none of DeepSpeed's; leave it out, or give a file of flags alone"
        )
    document = read_json(source)
    micro_batch = read_integer(document, "train_micro_batch_size_per_gpu", 1)
    whole = read_integer(document, "train_batch_size", 0) or None
    accumulated = read_integer(document, "gradient_accumulation_steps", 0)
    cluster = Cluster(**read_cut(document, ranks)._asdict())
    if whole is None and accumulated:
        whole = accumulated * micro_batch * cluster.data
    batch = Batch(known.seq_length, micro_batch, whole)
    return ModelFiles(model_of(known), cluster, batch)


def require_served(method: Method, cluster: Cluster) -> None:
    """Raise ValueError for a method that a cluster's engine refuses."""
    require_before(method.schedule.when, cluster.engine)
    require_hooks(method.schedule.when, cluster.captured_by)


def read_words(path: Path) -> list[str]:
    """Return the words of a file of flags, comments left out."""
    try:
        return shlex.split(read_text(path), comments=True)
    except ConfigError:
        raise
    except ValueError as error:  # of quotes
        raise ValueError(f"{path} holds no flags: {error}; close what is open") from None


def _megatron(known: argparse.Namespace, ranks: int | None) -> Cluster:
    tensor, pipeline = known.tensor_model_parallel_size, known.pipeline_model_parallel_size
    context, expert = known.context_parallel_size, known.expert_model_parallel_size
    own = known.expert_tensor_parallel_size
    of_dense, of_experts = tensor * context, expert * (own or tensor)
    least = pipeline * (math.lcm(of_dense, of_experts) if known.num_experts else of_dense)
    ranks = least if ranks is None else ranks
    if ranks % least:
        dense = f"tensor {tensor} x pipeline {pipeline}"
        dense += f" x context {context}" if context > 1 else ""
        words = f" and of expert {expert} x expert tensor {own or tensor} x pipeline {pipeline}"
        raise ValueError(f"--ranks {ranks} is no multiple of {dense}{words if expert > 1 else ''}")
    return Cluster(
        pipeline=pipeline,
        tensor=tensor,
        data=ranks // (pipeline * of_dense),
        is_bf16=known.bf16,
        is_sharded=known.use_distributed_optimizer,
        is_sequence_parallel=known.sequence_parallel,
        captured_by=_captured_by(known),
        context=context,
        expert=expert,
        expert_tensor=own,
        split=split_of(known),
    )


def _captured_by(known: argparse.Namespace) -> str | None:
    for name in ("enable-cuda-graph", "external-cuda-graph"):
        if getattr(known, name.replace("-", "_")):
            return f"--{name}"
    kind = known.cuda_graph_impl
    return None if kind == "none" else f"--cuda-graph-impl {kind}"


def _batch(known: argparse.Namespace) -> Batch:
    return Batch(known.seq_length, known.micro_batch_size, known.global_batch_size)


def stage_weights(model: GPT, cluster: Cluster, stage: Stage) -> list[Weight]:
    """Return a rank's weights of a stage, tensors whole; ValueError if they are not cut so."""
    if cluster.partition is not None:
        return weights_of_stage(model, stage, cluster.partition)
    return model.weights(stage, cluster.division, cluster.layers_of(model, stage.index))


def stage_shapes(model: GPT, cluster: Cluster, stage: Stage) -> list[ParameterShape]:
    """Return what the stage's ranks train together, every slice and every rank's experts apart."""
    found: list[ParameterShape] = []
    for weight in stage_weights(model, cluster, stage):
        if weight.is_expert:
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
    return [weight.on((0, 1)) for weight in copies_on_stage(model, stage, cluster.partition)]


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
    return dense, experts


def inner_of(model: GPT, cluster: Cluster, stage: Stage, batch: Batch) -> InnerMemory:
    """Return what the inner engine takes on a rank of a stage."""
    dense, experts = held_on_rank(model, cluster, stage)
    activations = _activations(model, cluster, stage, batch)
    if cluster.zero_stage is not None:
        return inner_memory.deepspeed(
            dense + experts, cluster.is_bf16, cluster.zero_stage, cluster.shards, activations,
            cluster.hpz, cluster.accumulated,
        )  # fmt: skip
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
