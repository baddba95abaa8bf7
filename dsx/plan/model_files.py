"""A model and how one cluster is cut, out of Megatron's flags or a DeepSpeed JSON.

What plans start from. Shapes are formulas (gpt_shapes.py), not those of a library's model on the
meta device, which would need torch.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsx.config.files import ConfigError, read_json, read_text, shorten
from dsx.config.flags import block_of_flags
from dsx.config.planned import planned_for
from dsx.core.types import Stage
from dsx.method.method import Method
from dsx.method.schedule.inside_backward import require_before, require_hooks
from dsx.plan.autotp_rules import Slices
from dsx.plan.deepspeed_json import read_cut, read_integer
from dsx.plan.deepspeed_layers import PipelineLayer, layers_of_stage
from dsx.plan.gpt_shapes import GPT, Division
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
    slices: Slices | None = None  # what AutoTP cuts over `tensor` ranks
    has_data_before_experts: bool = False  # DeepSpeed's ranks of the same experts are neighbours
    untold: str | None = None  # what is taken for the ranks of experts, where no file says it

    @property
    def engine(self) -> str:
        """The inner engine's name."""
        return "Megatron" if self.zero_stage is None else "DeepSpeed"

    @property
    def shares_optimizer(self) -> bool:
        """Whether data-parallel ranks share out the optimizer's state."""
        return self.is_sharded if self.zero_stage is None else self.zero_stage > 0

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
        """Over how many ranks Megatron cuts weights."""
        return Division(self.tensor, self.expert, self.slices_of_experts)

    def pipeline_layers(self, model: GPT, stage: Stage) -> list[PipelineLayer]:
        """Return the layers that DeepSpeed's pipeline has on a stage."""
        assert self.partition is not None
        own = layers_of_stage(model, stage, self.partition, self.expert)
        return [layer for _, layer in own]

    def layers(self, model: GPT) -> Layers:
        """Return the numbers of the layers by stage and chunk; ValueError if they do not divide."""
        return self.split.layers(model.layers, self.pipeline)

    def layers_of(self, model: GPT, stage: int) -> list[int]:
        """Return the numbers of a stage's layers, of all its chunks."""
        if self.partition is not None:
            layers = self.pipeline_layers(model, Stage(stage, self.pipeline))
            return [one.transformer for one in layers if one.transformer is not None]
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
        parts += [] if self.untold is None else [self.untold]
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

    What is None is as the file's own `dsx.plan` has it. ValueError for what is missing or does not
    go together.
    """
    if source.suffix != ".json":
        if model_flags is not None:
            raise ValueError("--model goes with a DeepSpeed JSON; a file of flags tells the model")
        words = read_words(source)
        known, ranks = parse(words), ranks or _planned_ranks(words, source)
        return ModelFiles(model_of(known), _megatron(known, ranks), _batch(known))
    document = read_json(source)
    planned = planned_for(document, source)
    if model_flags is None and planned.model is not None:
        model_flags = planned.model_file()
        if model_flags is None:
            raise ValueError(
                f"dsx.plan.model: there is no file {shorten(planned.model)}; write its path from "
                f"the folder of {source.name}, or give another by --model"
            )
    ranks = ranks or planned.ranks_per_cluster
    if model_flags is None:
        is_bare = document.keys() <= {"dsx"}  # as Megatron's launch takes it
        instead = (
            f"; of a Megatron run give the file of its flags, with --dsx-config {source} in it"
        )
        raise ValueError(
            f"{source} does not tell the model: add --model FILE, with Megatron's flags for its "
            'sizes, and --ranks-per-cluster N, or "plan": {"model": FILE, "ranks_per_cluster": N} '
            f'to its "dsx" block{instead if is_bare else ""}'
        )
    if ranks is None:
        raise ValueError(
            f"{source} does not tell the ranks of a cluster: add --ranks-per-cluster N, or "
            '"plan": {"ranks_per_cluster": N} to its "dsx" block'
        )
    return of_deepspeed(document, model_flags, ranks, source)


def of_deepspeed(
    document: Mapping[str, Any], model_flags: Path, ranks: int, source: Path
) -> ModelFiles:
    """Return what a DeepSpeed JSON, that of `source`, and a file for the model say."""
    known = parse(read_words(model_flags), is_whole=False)
    micro_batch = read_integer(document, "train_micro_batch_size_per_gpu", 1)
    whole = read_integer(document, "train_batch_size", 0) or None
    accumulated = read_integer(document, "gradient_accumulation_steps", 0)
    cluster = Cluster(**read_cut(document, ranks)._asdict())
    if whole is None and accumulated:
        whole = accumulated * micro_batch * cluster.data
    batch = replace(_batch(known), micro_batch=micro_batch, sequences_per_step=whole)
    model = model_of(known)
    is_told = read_integer(document.get("moe") or {}, "ep_size", 0) > 0
    if model.experts is not None and not is_told:
        cluster = replace(cluster, untold=f"expert 1 (no moe.ep_size in {source.name})")
    require_cut(model, cluster)
    if not is_told and known.num_experts and known.expert_model_parallel_size > 1:
        size = known.expert_model_parallel_size
        raise ValueError(
            f"--expert-model-parallel-size={size} is Megatron's: a DeepSpeed run gives it to its "
            f'MoE layers, and {source} says it to a plan; add "moe": {{"ep_size": {size}}} there'
        )
    return ModelFiles(model, cluster, batch)


def require_cut(model: GPT, cluster: Cluster) -> None:
    """Raise ValueError for a model that DeepSpeed, or dsx with it, does not train so."""
    experts = model.experts
    if experts is None:
        if cluster.expert > 1:
            raise ValueError(
                f"moe.ep_size={cluster.expert} of a model without experts: give their number "
                "(--num-experts), or leave it out"
            )
        return
    if experts.count % cluster.expert:
        raise ValueError(
            f"--num-experts={experts.count} do not divide over moe.ep_size={cluster.expert} ranks; "
            "use a number of ranks that divides them"
        )
    others = {
        "zero_optimization.stage=3": cluster.zero_stage == 3,
        f"tensor_parallel.autotp_size={cluster.tensor}": cluster.tensor > 1,
        f"sequence_parallel_size={cluster.context}": cluster.context > 1,
    }
    for name, is_used in others.items():
        if is_used:
            raise ValueError(
                f"--num-experts={experts.count} with {name}: DeepSpeed's experts are served with "
                "data parallelism and in pipelines, under ZeRO-0 to 2; use those alone"
            )
    if cluster.partition is not None:
        stages = [Stage(index, cluster.pipeline) for index in range(cluster.pipeline)]
        layers = [cluster.pipeline_layers(model, stage) for stage in stages]
        without = [at for at, own in enumerate(layers) if not any(o.has_experts for o in own)]
        if without:
            raise ValueError(
                f"pipeline.stages={cluster.pipeline} by {cluster.partition}: stage {without[0]} "
                "has no layer of experts, where DeepSpeed waits forever; cut fewer stages, or by "
                "another partition"
            )


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
        raise ValueError(
            f"--ranks-per-cluster {ranks} is no multiple of {dense}{words if expert > 1 else ''}"
        )
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


def _planned_ranks(words: Sequence[str], source: Path) -> int | None:
    """Return the ranks of a cluster that flags of dsx plan with, None if they do not say."""
    if not any(word.startswith(("--dsx-plan-", "--dsx-config")) for word in words):
        return None
    usual = {"preset": "diloco", "clusters": {"num_clusters": 2}}  # is read, and refused, elsewhere
    planned = planned_for(block_of_flags(words, usual), Path())
    if planned.model is not None and Path(planned.model).resolve() != source.resolve():
        raise ValueError(
            f"dsx.plan.model={planned.model!r} is of a DeepSpeed JSON; a file of flags tells the "
            "model: leave it out"
        )
    return planned.ranks_per_cluster


def _batch(known: argparse.Namespace) -> Batch:
    return Batch(known.seq_length, known.micro_batch_size, known.global_batch_size)
