"""A small Llama-style GPT of megatron-core, its optimizer and its schedule, on the wheel alone.

What Megatron-LM's `megatron.training` does around its core, as little of it as an example needs:
build the chunks of this rank's stage, wrap them for data parallelism, make the optimizer and its
schedule, run forward and backward over micro-batches. Flags are Megatron's own. Layers are
megatron-core's local ones, experts one after another: no Transformer Engine, no apex. Where the
sequence is cut, a stand-in is the attention (dsx/bench/megatron_context.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from dsx.bench.megatron_context import own_part, with_gathered_attention


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
        whole = {"tokens": windows[:, :-1], "positions": positions, "labels": windows[:, 1:]}
        part = own_part(whole)  # of a context-parallel rank; else all
        labels = part["labels"].contiguous()
        losses = chunk(part["tokens"], part["positions"], hidden[None, None], labels=labels)

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            told = {"loss": loss.detach().clone()}  # the schedule divides `loss` in place
            return loss / self.arguments.context_parallel_size, told

        return losses, mean


def build_engine(arguments: argparse.Namespace, vocab_size: int) -> Engine:
    """Initialise Megatron's parallel state in this cluster's world, and build this rank's part."""
    chunks_per_rank = arguments.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        chunks_per_rank if chunks_per_rank > 1 else None,
        context_parallel_size=arguments.context_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
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
    of_experts: dict[str, Any] = {}
    if arguments.num_experts:
        of_experts = {
            "num_moe_experts": arguments.num_experts,
            "expert_model_parallel_size": arguments.expert_model_parallel_size,
            "moe_ffn_hidden_size": arguments.moe_ffn_hidden_size or arguments.ffn_hidden_size,
            "moe_router_topk": arguments.moe_router_topk,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": arguments.moe_aux_loss_coeff,
            "moe_token_dispatcher_type": "alltoall",
        }
    return TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        ffn_hidden_size=arguments.ffn_hidden_size,
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=arguments.context_parallel_size,
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
        **of_experts,
    )


def padded_vocab_size(arguments: argparse.Namespace, num_tokens: int) -> int:
    """Return the vocabulary rounded up as Megatron does, so that it can be cut into slices."""
    step = arguments.make_vocab_size_divisible_by * arguments.tensor_model_parallel_size
    return -(-num_tokens // step) * step


def _make_chunk(
    arguments: argparse.Namespace, config: TransformerConfig, vocab_size: int, index: int
) -> Any:
    chunks = arguments.virtual_pipeline_model_parallel_size
    stage, stages = _stage()
    layers = _layers(arguments, config, index if chunks > 1 else None)
    model = GPTModel(
        config,
        layers if arguments.context_parallel_size == 1 else with_gathered_attention(layers),
        vocab_size=vocab_size,
        max_sequence_length=arguments.seq_length,
        pre_process=stage == 0 and index == 0,
        post_process=stage == stages - 1 and index == chunks - 1,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        vp_stage=index if chunks > 1 else None,
    ).cuda()
    return Float16Module(config, model) if arguments.bf16 else model


def _layers(arguments: argparse.Namespace, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the specification of a chunk's layers."""
    if not arguments.num_experts:
        return get_gpt_layer_local_spec(normalization="RMSNorm")
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 looks for it without asking whether
        moe_utils.te_general_gemm = None  # Transformer Engine is there
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )


def _stage() -> tuple[int, int]:
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
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run may be longer
    )
