"""A small Llama-style GPT of megatron-core, its optimizer, schedule and checkpoint, on the wheel.

What Megatron-LM's `megatron.training` does around its core, as little of it as an example needs:
build the chunks of this rank's stage, wrap them for data parallelism, make the optimizer and its
schedule, run forward and backward over micro-batches, and save in the torch_dist format. Flags are
Megatron's own. Layers are megatron-core's local ones: no Transformer Engine, no apex.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass
class Engine:
    """One rank's part of the model, and what trains it."""

    arguments: argparse.Namespace
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    device: torch.device

    @property
    def num_micro_batches(self) -> int:
        """Return how many micro-batches a rank takes per step."""
        ranks = parallel_state.get_data_parallel_world_size()
        return self.arguments.global_batch_size // (self.arguments.micro_batch_size * ranks)

    def train_step(self, batches: Sequence[Tensor]) -> float:
        """Take one step on windows `[micro_batch_size, length + 1]`; return the mean loss.

        The loss is this rank's share of the cluster's mean: only the last stage has one.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._run(batches, is_training=True)
        self.optimizer.step()
        self.scheduler.step(increment=self.arguments.global_batch_size)
        return loss

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Tensor]) -> float:
        """Return the mean loss, as `train_step` does."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
            chunk.eval()
        loss = self._run(batches, is_training=False)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def _run(self, batches: Sequence[Tensor], is_training: bool) -> float:
        iterators = [iter(batches) for _ in self.chunks]  # each chunk reads the same
        is_one = len(self.chunks) == 1
        results = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iterators[0] if is_one else iterators,
            model=self.chunks[0] if is_one else self.chunks,
            num_microbatches=len(batches),
            seq_length=self.arguments.seq_length,
            micro_batch_size=self.arguments.micro_batch_size,
            forward_only=not is_training,
        )
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        losses = [result["loss"].item() for result in results or []]
        return stages * sum(losses) / len(losses) if losses else 0.0

    def _forward_step(
        self, batches: Any, chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        windows = next(batches).to(self.device)
        length = windows.shape[1] - 1
        positions = torch.arange(length, device=self.device).expand(len(windows), -1)
        hidden = torch.ones(length, length, dtype=torch.bool, device=self.device).triu(1)
        losses = chunk(windows[:, :-1], positions, hidden[None, None], labels=windows[:, 1:])

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides `loss` in place

        return losses, mean


def build_engine(arguments: argparse.Namespace, vocab_size: int) -> Engine:
    """Initialise Megatron's parallel state in this cluster's world, and build this rank's part."""
    chunks_per_rank = arguments.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        chunks_per_rank if chunks_per_rank > 1 else None,
    )
    # as Megatron: other weights on every stage, the same in all clusters
    seed = arguments.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    config = transformer_config(arguments)
    modules = [_make_chunk(arguments, config, vocab_size, i) for i in range(chunks_per_rank)]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=arguments.overlap_grad_reduce,
        overlap_param_gather=arguments.overlap_param_gather,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
    )
    chunks: list[Any] = [
        DistributedDataParallel(config, ddp, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    optimizer = get_megatron_optimizer(_optimizer_config(arguments, config), chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if arguments.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    device = next(modules[0].parameters()).device
    return Engine(arguments, chunks, optimizer, _make_scheduler(arguments, optimizer), device)


def transformer_config(arguments: argparse.Namespace) -> TransformerConfig:
    """Return the model's configuration: RMS norms, rotary positions, SwiGLU, no biases."""
    chunks = arguments.virtual_pipeline_model_parallel_size
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    return TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        ffn_hidden_size=arguments.ffn_hidden_size,
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # with two stages, batched sends would be wrong for virtual ones
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=arguments.bf16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        # what would need apex or Transformer Engine
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def padded_vocab_size(arguments: argparse.Namespace, num_tokens: int) -> int:
    """Return the vocabulary rounded up as Megatron does, so that it can be cut into slices."""
    step = arguments.make_vocab_size_divisible_by * arguments.tensor_model_parallel_size
    return -(-num_tokens // step) * step


def _make_chunk(
    arguments: argparse.Namespace, config: TransformerConfig, vocab_size: int, index: int
) -> Any:
    chunks = arguments.virtual_pipeline_model_parallel_size
    stage, stages = config_stage()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocab_size,
        max_sequence_length=arguments.seq_length,
        pre_process=stage == 0 and index == 0,
        post_process=stage == stages - 1 and index == chunks - 1,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        vp_stage=index if chunks > 1 else None,
    ).cuda()
    return Float16Module(config, model) if arguments.bf16 else model


def config_stage() -> tuple[int, int]:
    """Return this rank's pipeline stage, and how many there are."""
    state: Any = parallel_state
    return (
        state.get_pipeline_model_parallel_rank(),
        state.get_pipeline_model_parallel_world_size(),
    )


def _optimizer_config(arguments: argparse.Namespace, config: TransformerConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=arguments.lr,
        min_lr=arguments.min_lr,
        weight_decay=arguments.weight_decay,
        adam_beta1=arguments.adam_beta1,
        adam_beta2=arguments.adam_beta2,
        bf16=arguments.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
        overlap_param_gather=arguments.overlap_param_gather,
        clip_grad=arguments.clip_grad,
    )


def _make_scheduler(arguments: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    size = arguments.global_batch_size  # it counts samples
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=arguments.lr,
        min_lr=arguments.min_lr,
        lr_warmup_steps=arguments.lr_warmup_iters * size,
        lr_decay_steps=arguments.train_iters * size,
        lr_decay_style="cosine",
        start_wd=arguments.weight_decay,
        end_wd=arguments.weight_decay,
        wd_incr_steps=arguments.train_iters * size,
        wd_incr_style="constant",
        override_opt_param_scheduler=True,  # a resumed run may be longer
    )


def save_checkpoint(
    directory: Path, iteration: int, chunks: Sequence[Any], optimizer: Any, scheduler: Any = None
) -> None:
    """Save in the torch_dist format under the name that Megatron gives; all ranks call it."""
    path = directory / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(chunks, optimizer, scheduler, is_loading=False)
    dist_checkpointing.save(state, str(path))
    dist.barrier()
    if dist.get_rank() == 0:
        (directory / TRACKER).write_text(str(iteration))
    dist.barrier()


def load_checkpoint(
    directory: Path, chunks: Sequence[Any], optimizer: Any, scheduler: Any = None
) -> int:
    """Load what the tracker names; return its iteration. FileNotFoundError if there is none."""
    tracker = directory / TRACKER
    if not tracker.is_file():
        raise FileNotFoundError(f"no {tracker}: nothing has been saved there")
    iteration = int(tracker.read_text())
    path = directory / f"iter_{iteration:07d}"
    _allocate_moments(optimizer)
    wanted = _sharded_state(chunks, optimizer, scheduler, is_loading=True)
    state = dist_checkpointing.load(wanted, str(path))
    for index, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(state[f"model{index}"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    _restore_steps(optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    return iteration


def _sharded_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return torch's AdamW where it stands in for a fused one in a distributed optimizer."""
    found: list[torch.optim.Optimizer] = []
    for leaf in optimizer.chained_optimizers:
        is_sharded = hasattr(leaf, "model_param_group_index_map")
        if is_sharded and isinstance(leaf.optimizer, torch.optim.AdamW):
            found.append(leaf.optimizer)
    return found


def _allocate_moments(optimizer: Any) -> None:
    """Give AdamW the state that megatron-core 0.16 expects it to have before it loads any."""
    for adam in _sharded_optimizers(optimizer):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter].update(step=torch.tensor(0.0), **moments)


def _restore_steps(optimizer: Any) -> None:
    """Give each parameter the step count that megatron-core 0.16 leaves with its group."""
    for adam in _sharded_optimizers(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter]["step"] = torch.tensor(float(group["step"]))


def _sharded_state(
    chunks: Sequence[Any], optimizer: Any, scheduler: Any, is_loading: bool
) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    state: dict[str, Any] = {
        f"model{index}": unwrapped(chunk).sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(chunks)
    }
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading, metadata=metadata)
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    return state


def unwrapped(chunk: Any) -> Any:
    """Return the model inside Megatron's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def gather_weights(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Return the cluster's weights in fp32, by name, on rank 0; all ranks of the cluster call it.

    Slices are put together along the dimension that tensor parallelism cuts them.
    """
    own: dict[str, tuple[int, int | None, Tensor]] = {}
    rank = parallel_state.get_tensor_model_parallel_rank()
    for chunk in chunks:
        model = unwrapped(chunk)
        for name, weight in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
            is_cut = getattr(weight, "tensor_model_parallel", False)
            dimension = weight.partition_dim if is_cut else None
            own[".".join(parts)] = (rank if is_cut else 0, dimension, weight.detach().float().cpu())
    is_writer = dist.get_rank() == 0
    everyone: list[Any] | None = [None] * dist.get_world_size() if is_writer else None
    dist.gather_object(own, everyone)
    slices: dict[str, dict[int, Tensor]] = {}
    dimensions: dict[str, int | None] = {}
    for weights in everyone or []:
        for name, (place, dimension, weight) in weights.items():
            slices.setdefault(name, {})[place] = weight
            dimensions[name] = dimension
    return {
        name: torch.cat([parts[k] for k in sorted(parts)], dim=dimensions[name] or 0)
        for name, parts in slices.items()
    }
