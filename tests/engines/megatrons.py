"""A tiny GPT of megatron-core for two clusters, and the same training in plain torch."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dsx
from dsx.bench.megatron_context import own_part, with_gathered_attention
from dsx.comm.world import current_world
from tests.engines.engines import NUM_CLUSTERS
from tests.engines.megatron_experts import (
    expert_settings,
    in_whole_layer,
    layers_with_experts,
    mixture,
    move_biases,
    tell_experts_apart,
)
from tests.engines.megatron_families import GROUPED, MODELS, SPECS, TRANSFORMERS
from tests.engines.megatron_fully_sharded import fully_sharded, gathered, with_shards
from tests.engines.megatron_models import OTHER, SETTINGS, build_other, outcome
from tests.engines.megatron_muon import PlainMuon, goes_by_muon, muon_settings
from tests.engines.megatron_precision import fused_adam, settings_of
from tests.engines.pipelines import StageReference
from tests.reference import Recipe
from tests.reference_schedules import Clock, due_streaming
from tests.tiny import H

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))  # with megatron_files

# looked up and not imported: in a rank's process megatron comes after `megatron_on_cpu`
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="no megatron-core",
)
HIDDEN, HEADS, VOCAB, LENGTH = 16, 2, 32, 8
MICRO_BATCHES, MICRO_SIZE = 2, 2
RATE, DECAY, EPSILON = 0.01, 0.01, 1e-3  # an epsilon that does not blow rounding up
STREAM = {
    "schedule": {"interval": H},
    "fragments": {"num_fragments": 2},
    "delay": {"steps": 2, "alpha": 0.3},
}
LAYERWISE = {
    "preset": "dreamddp",
    "schedule": {
        "interval": 3, "backwards": MICRO_BATCHES,
        "backward_seconds": [1.0] * 2, "transfer_seconds": [1.0] * 2,
    },
    "fragments": {"num_fragments": 2},
    "delay": {},
}  # fmt: skip
WHOLE = {"fragments": {}, "delay": {}}
CHANGES: dict[str, dict[str, Any]] = {  # to STREAM, by preset
    "streaming_diloco": {},
    "dreamddp": LAYERWISE,
    "cocktail_sgd": {
        **WHOLE,
        "preset": "cocktail_sgd",
        "schedule": {},
        "compression": {"random_ratio": 0.25, "top_k_ratio": 0.2, "group_size": 32},
    },
    "overlap_local_sgd": {**WHOLE, "preset": "overlap_local_sgd"},
}
RECIPES = {
    "streaming_diloco": Recipe([], H, True, 2, 0.3, "nesterov", 0.4, 0.9),
    "dreamddp": Recipe(
        [], 3, False, 0, 1.0, "none", 0.0,
        delay="average", when="before", table=[(1, 0), (1,), (1,)],
    ),
}  # fmt: skip


class Kind(NamedTuple):
    """One configuration inside a cluster."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1  # virtual stages per rank
    context: int = 1
    precision: str = "fp32"
    is_sharded: bool = False  # DistributedOptimizer
    overlaps: bool = False  # gradients and parameters
    is_tied: bool = False
    optimizer: str = "adam"
    layers_per_stage: int = 2  # one for each of two fragments
    preset: str = "streaming_diloco"
    ffn: int = 2 * HIDDEN  # twice as much makes matrices that are worth a code
    family: str = "gpt2"  # in megatron_families.py
    first_stage: int | None = None  # layers of the first of two stages, where they are uneven
    experts: int = 0  # in every other layer
    expert_parallel: int = 1
    expert_tensor: int | None = None  # as the dense layers
    is_biased: bool = False  # the router's choice, by what each expert has had to do
    fused: str = ""  # by a double of Transformer Engine's Adam, in megatron_precision.py
    fsdp: str = ""  # instead of DistributedDataParallel; "torch", or Megatron-FSDP's strategy

    @property
    def num_layers(self) -> int:
        return self.layers_per_stage * self.pipeline

    def __str__(self) -> str:
        parts = [f"tp{self.tensor}", f"pp{self.pipeline}", f"vpp{self.chunks}", self.precision]
        parts += [f"cp{self.context}"] if self.context > 1 else []
        if self.experts:
            parts += [f"ep{self.expert_parallel}", f"etp{self.expert_tensor or self.tensor}"]
        words = {"sharded": self.is_sharded, "overlaps": self.overlaps, "tied": self.is_tied}
        words[self.preset] = self.preset != "streaming_diloco"
        words[self.optimizer] = self.optimizer != "adam"
        words["biased"] = self.is_biased
        words[f"fused_{self.fused}"] = bool(self.fused)
        words[f"fsdp_{self.fsdp}"] = bool(self.fsdp)
        words[self.family] = self.family != "gpt2"
        words["uneven"] = self.first_stage is not None
        return "-".join([*parts, *(word for word, is_so in words.items() if is_so)])


@dataclass
class Engine:
    """What a Megatron training script holds."""

    kind: Kind
    chunks: list[Any]
    optimizer: Any
    run_schedule: Any

    @property
    def handle(self) -> dsx.Handle:
        return self.optimizer.dsx

    @property
    def data_rank(self) -> int:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_rank()


def dsx_config(**changes: Any) -> dict[str, Any]:
    clusters = {"num_clusters": NUM_CLUSTERS, "deadline_seconds": 60}
    return {"dsx": {"preset": "streaming_diloco", "clusters": clusters, **STREAM, **changes}}


def config_of(kind: Kind, **changes: Any) -> dict[str, Any]:
    return dsx_config(**{**CHANGES[kind.preset], **changes})


def join() -> Any:
    """Join this process's cluster once, with megatron-core on the CPU."""
    world = current_world()
    if world is None:
        from dsx.bench.megatron_on_cpu import install

        install()
        world = dsx.init_distributed(dsx_config())
    return world


def build_engine(
    kind: Kind, seed: int | None = None, attach: dict[str, Any] | None = None, **changes: Any
) -> Engine:
    """Return a model with dsx attached; weights differ between clusters until then."""
    world = join()
    engine = build_inner(kind, world.cluster_id if seed is None else seed)
    config = config_of(kind, **changes)
    dsx.attach_megatron(engine.chunks, engine.optimizer, config=config, **(attach or {}))
    return engine


def build_inner(kind: Kind, seed: int) -> Engine:
    """Return a model and its optimizer as `megatron.training` builds them, without dsx."""
    join()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    parallel_state.destroy_model_parallel()
    end_groups()
    parallel_state.initialize_model_parallel(
        kind.tensor,
        kind.pipeline,
        kind.chunks if kind.chunks > 1 else None,
        context_parallel_size=kind.context,
        expert_model_parallel_size=kind.expert_parallel,
        expert_tensor_parallel_size=kind.expert_tensor,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = transformer_config(kind)
    modules = [make_chunk(kind, config, index) for index in range(kind.chunks)]
    for module in modules:
        tell_experts_apart(module, config, seed)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=kind.overlaps,
        overlap_param_gather=kind.overlaps,
        use_distributed_optimizer=kind.is_sharded,
        bucket_size=1000 if kind.overlaps else None,  # elements: several of them
    )
    if kind.fsdp:
        chunks = [fully_sharded(kind, config, module) for module in modules]
    else:
        chunks = [
            DistributedDataParallel(config, ddp, module, disable_bucketing=index > 0)
            for index, module in enumerate(modules)
        ]
        for chunk in chunks:
            chunk.broadcast_params()
    is_muon = kind.optimizer == "muon"
    more = muon_settings() if is_muon else {}
    with fused_adam() if kind.fused else nullcontext():
        optimizer = (get_megatron_muon_optimizer if is_muon else get_megatron_optimizer)(
            OptimizerConfig(
                optimizer=kind.optimizer,
                lr=RATE,
                weight_decay=DECAY,
                adam_eps=EPSILON,
                bf16=kind.precision == "bf16",
                fp16=kind.precision == "fp16",
                initial_loss_scale=16.0,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=kind.is_sharded,
                overlap_param_gather=kind.overlaps,
                clip_grad=1.0,
                **(settings_of(kind.fused) if kind.fused else more),
            ),
            chunks,
        )
    for group in optimizer.param_groups:  # what Megatron's scheduler does at every step
        group["lr"], group["weight_decay"] = RATE, DECAY * group["wd_mult"]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if kind.overlaps:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        if len(chunks) == 1:
            config.no_sync_func = config.no_sync_func[0]
    return Engine(kind, chunks, optimizer, get_forward_backward_func())


def end_groups() -> None:
    """Destroy the groups of the engine before, each of which has threads of its own."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def transformer_config(kind: Kind) -> Any:
    from megatron.core.transformer import TransformerConfig

    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    is_virtual = kind.chunks > 1
    return TransformerConfig(
        num_layers=kind.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=2 * HEADS if kind.family in GROUPED else HEADS,
        ffn_hidden_size=kind.ffn,
        tensor_model_parallel_size=kind.tensor,
        pipeline_model_parallel_size=kind.pipeline,
        context_parallel_size=kind.context,
        virtual_pipeline_model_parallel_size=kind.chunks if is_virtual else None,
        # with two stages batched sends are wrong for virtual ones
        overlap_p2p_comm=is_virtual,
        batch_p2p_comm=not is_virtual,
        params_dtype=types[kind.precision],
        pipeline_dtype=types[kind.precision],
        bf16=kind.precision == "bf16",
        fp16=kind.precision == "fp16",
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        num_layers_in_first_pipeline_stage=kind.first_stage,
        **({"transformer_impl": "local"} if kind.fsdp else {}),
        **{
            "bias_activation_fusion": False,
            **expert_settings(kind),
            **TRANSFORMERS.get(kind.family, {}),
        },
        **SETTINGS.get(kind.family, {}),
    )


def make_chunk(kind: Kind, config: Any, index: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    stage, last = parallel_state.get_pipeline_model_parallel_rank(), kind.pipeline - 1
    vp_stage = index if kind.chunks > 1 else None
    if kind.family in OTHER:
        ends = {"pre_process": stage == 0 and index == 0}
        ends["post_process"] = stage == last and index == kind.chunks - 1
        sizes = {"vocab_size": VOCAB, "max_sequence_length": LENGTH}
        other = build_other(kind, config, vp_stage, **sizes, **ends)
        return other if kind.precision == "fp32" else Float16Module(config, other)
    spec = get_gpt_layer_local_spec(**SPECS.get(kind.family, {}))
    if kind.experts:
        spec = layers_with_experts(kind, config, vp_stage)
    model = GPTModel(
        config,
        spec if kind.context == 1 else with_gathered_attention(spec),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=stage == 0 and index == 0,
        post_process=stage == last and index == kind.chunks - 1,
        share_embeddings_and_output_weights=kind.is_tied,
        vp_stage=vp_stage,
        **MODELS.get(kind.family, {}),
    )
    return model if kind.precision == "fp32" else Float16Module(config, model)


def batch(cluster: int, step: int, part: int) -> Tensor:
    """Windows `[MICRO_SIZE, LENGTH + 1]` in which each token follows from the one before."""
    generator = torch.Generator().manual_seed(1000 * cluster + 10 * step + part)
    rows = [torch.randint(VOCAB, (MICRO_SIZE,), generator=generator)]
    for _ in range(LENGTH):
        rows.append((3 * rows[-1] + 1 + cluster) % VOCAB)
    return torch.stack(rows, dim=1)


def forward_step(batches: Iterator[Tensor], model: Any) -> Any:
    from megatron.core import parallel_state

    windows = next(batches)
    if (made := outcome(model, windows)) is not None:
        return made
    positions = torch.arange(LENGTH).expand(len(windows), -1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]  # what is hidden
    part = own_part({"x": windows[:, :-1], "places": positions, "labels": windows[:, 1:]})
    losses = model(part["x"], part["places"], mask, labels=part["labels"])
    group = parallel_state.get_context_parallel_group()

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # the whole sequence's mean, of which each rank has its part, is what Megatron takes
        own = output.float().mean() / group.size()
        whole = own.detach().clone()
        dist.all_reduce(whole, group=group)
        return own, {"loss": whole}

    return losses, loss_of


def train_step(engine: Engine, step: int, cluster: int | None = None, poison: bool = False) -> Any:
    """Take one step; return its loss on the last stage (else None), and whether it was taken."""
    cluster = engine.handle.cluster_id if cluster is None else cluster
    parts = [engine.data_rank * MICRO_BATCHES + micro for micro in range(MICRO_BATCHES)]
    batches = [batch(cluster, step, part) for part in parts]
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    engine.optimizer.zero_grad()
    iterators = [iter(batches) for _ in engine.chunks]
    is_one = len(engine.chunks) == 1
    results = engine.run_schedule(
        forward_step_func=forward_step,
        data_iterator=iterators[0] if is_one else iterators,
        model=engine.chunks[0] if is_one else engine.chunks,
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH,
        micro_batch_size=MICRO_SIZE,
        forward_only=False,
    )
    if poison:
        engine.chunks[0].buffers[0].grad_data.fill_(float("inf"))
    was_taken, *_ = engine.optimizer.step()
    loss = torch.stack([r["loss"] for r in results]).mean().item() if results else None
    return loss, was_taken


def gather_overlapped(engine: Engine) -> None:
    """Do what the next forward would begin with, as Megatron does before an evaluation."""
    if engine.kind.overlaps:
        for chunk in engine.chunks:
            chunk.start_param_sync(force_sync=True)


def local_weights(engine: Engine) -> dict[str, tuple[Tensor, int | None, int]]:
    """This rank's weights by name in the model, with the dimension that they are cut along.

    And with the number of the slice, which is another rank for experts.
    """
    from megatron.core import parallel_state

    dense = engine.kind.tensor, parallel_state.get_tensor_model_parallel_rank()
    experts = (
        (engine.kind.expert_tensor or dense[0]),
        (parallel_state.get_expert_tensor_parallel_rank()),
    )
    found: dict[str, tuple[Tensor, int | None, int]] = {}
    for chunk in map(with_shards, engine.chunks):
        numbers = {
            path: module.layer_number - 1
            for path, module in chunk.named_modules()
            if hasattr(module, "layer_number") and path.split(".")[-1].isdigit()
        }
        biases = [entry for entry in chunk.named_buffers() if entry[0].endswith("expert_bias")]
        for name, parameter in (*chunk.named_parameters(), *biases):
            for path, number in numbers.items():
                if name.startswith(f"{path}."):
                    rest = name.removeprefix(f"{path}.")
                    name = f"{path.rpartition('layers.')[0]}layers.{number}.{rest}"
                    break
            name = name.replace("module.", "").removeprefix("decoder.")
            count, rank = experts if ".experts." in name else dense
            is_cut = count > 1 and getattr(parameter, "tensor_model_parallel", False)
            # a Mamba layer's vectors do not say which
            dimension = getattr(parameter, "partition_dim", 0) if is_cut else None
            whole = in_whole_layer(name, chunk.config)
            if hasattr(parameter, "full_tensor"):
                parameter = gathered(parameter)
            found[whole] = (parameter.detach().float().clone(), dimension, rank)
    return found


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """The cluster's weights, put together from its ranks. Collective in the cluster.

    AssertionError where ranks that hold the same do not have the same bits.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, local_weights(engine))
    slices: dict[str, dict[int, Tensor]] = {}
    dimensions: dict[str, int | None] = {}
    for weights in ranks:
        for name, (weight, dimension, rank) in weights.items():
            key = rank if dimension is not None else 0
            held = slices.setdefault(name, {}).setdefault(key, weight)
            assert held.equal(weight), f"{name} differs within the cluster"
            dimensions[name] = dimension
    whole = {
        name: torch.cat([parts[k] for k in sorted(parts)], dim=dimensions[name] or 0)
        for name, parts in slices.items()
    }
    if engine.kind.is_tied and "output_layer.weight" in whole:
        tied = whole.pop("output_layer.weight")
        assert tied.equal(whole["embedding.word_embeddings.weight"]), "tied copies differ"
    return whole


class PlainGPT(nn.Module):
    """The same model in plain torch, from whole weights."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.num_layers = sum(name.endswith("input_layernorm.weight") for name in weights)
        self.names = {name.replace(".", "/"): name for name in weights}
        self.w = nn.ParameterDict({n.replace(".", "/"): w.clone() for n, w in weights.items()})
        self.load: dict[int, Tensor] = {}  # tokens of each expert in this step, by its router

    def by_name(self) -> dict[str, Tensor]:
        return {name: self.w[key] for key, name in self.names.items()}

    def forward(self, windows: Tensor) -> Tensor:
        w = self.by_name()
        tokens, targets = windows[:, :-1], windows[:, 1:]
        table = w["embedding.word_embeddings.weight"]
        x = F.embedding(tokens, table) + w["embedding.position_embeddings.weight"][:LENGTH]
        for layer in range(self.num_layers):
            x = self.layer(x, {n.removeprefix(f"layers.{layer}."): p for n, p in w.items()})
        x = self.norm(x, w, "final_layernorm")
        logits = F.linear(x, w.get("output_layer.weight", table))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def layer(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        normed = self.norm(x, w, "input_layernorm")
        mixed = self.linear(normed, w, "self_attention.linear_qkv").unflatten(-1, (HEADS, 3, -1))
        query, key, value = mixed.transpose(1, 2).unbind(3)
        scores = query @ key.mT / math.sqrt(HIDDEN // HEADS)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        heads = scores.masked_fill(hidden, -10000.0).softmax(-1) @ value
        x = x + self.linear(heads.transpose(1, 2).flatten(2), w, "self_attention.linear_proj")
        normed = self.norm(x, w, "pre_mlp_layernorm")
        if "mlp.router.weight" in w:
            return x + mixture(normed, w, self.load)
        inner = F.gelu(self.linear(normed, w, "mlp.linear_fc1"))
        return x + self.linear(inner, w, "mlp.linear_fc2")

    def norm(self, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(self, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def fragments_of(kind: Kind, names: Sequence[str]) -> list[list[list[str]]]:
    """The names in each fragment of each stage: two per stage, strided."""
    per_chunk = kind.num_layers // (kind.pipeline * kind.chunks)
    stages = []
    for stage in range(kind.pipeline):
        layers = [
            layer
            for layer in range(kind.num_layers)
            if layer // per_chunk % kind.pipeline == stage
        ]  # fmt: skip
        groups = [[n for n in names if n.startswith(f"layers.{layer}.")] for layer in layers]
        if stage == 0:
            groups[0] = [n for n in names if n.startswith("embedding.")] + groups[0]
        if stage == kind.pipeline - 1:
            groups[-1] += [n for n in names if n.startswith(("final", "output_layer"))]
        fragments: list[list[str]] = [[], []]
        for index, group in enumerate(groups):
            fragments[index % 2] += group
        stages.append(fragments)
    return stages


@dataclass
class Reference(StageReference):
    """The outer training of one stage; the number of stages is the kind's."""

    stages: int = 1

    def due(self, step: int) -> Sequence[int]:
        if self.recipe.table is not None:
            return super().due(step)
        shift = self.index * H // (len(self.recipe.fragments) * self.stages)
        return due_streaming(step - shift, H, len(self.recipe.fragments))


def reference(
    kind: Kind, start: dict[str, Tensor], num_steps: int, data_ranks: int = 1
) -> list[dict[str, Tensor]]:
    """Every cluster's weights after the same training, in fp32."""
    models = [PlainGPT(start) for _ in range(NUM_CLUSTERS)]
    local = [model.by_name() for model in models]
    optimizers = []
    for weights in local:
        is_muon = kind.optimizer == "muon"
        by_muon = {n: p for n, p in weights.items() if is_muon and goes_by_muon(n, p)}
        if by_muon:
            optimizers.append(PlainMuon(by_muon, RATE, DECAY, HEADS))
        rest = [p for n, p in weights.items() if n not in by_muon]
        vectors = [p for p in rest if p.dim() == 1]
        matrices = [p for p in rest if p.dim() > 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizers.append(torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY, eps=EPSILON))
    stages: list[Reference] = []
    with torch.no_grad():
        for index, fragments in enumerate(fragments_of(kind, list(start))):
            names = [n for fragment in fragments for n in fragment]
            own = [{n: parameters[n] for n in names} for parameters in local]
            recipe = replace(RECIPES[kind.preset], fragments=fragments)
            stages.append(
                Reference(recipe, own, Clock(len(fragments)), index=index, stages=kind.pipeline)
            )
    parts = MICRO_BATCHES * data_ranks
    for step in range(1, num_steps + 1):
        before = [copy.deepcopy(parameters) for parameters in local]
        for cluster, model in enumerate(models):
            model.zero_grad()
            loss = sum(model(batch(cluster, step, part)) for part in range(parts)) / parts
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            move_biases(local[cluster], model.load)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for stage in stages:
                stage.boundary(step, before)
    return [{n: p.detach().clone() for n, p in parameters.items()} for parameters in local]
