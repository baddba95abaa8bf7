"""megatron-core: a GPT cut over tensor, pipeline, context and expert ranks, on the CPU.

Layers are megatron-core's local ones. Where the sequence is cut, a stand-in of ours is the
attention (dsx/bench/megatron_context.py): those of megatron-core need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.bench.chaos.engines.megatron import warm as warm_megatron
from dsx.bench.engines.combinations import Combination
from dsx.bench.engines.job import MICRO, RATE, SEED, SHAPE
from dsx.bench.megatron_chunk import chunks_and_optimizer
from dsx.bench.megatron_context import own_part, with_gathered_attention

_DECAY = 0.01
_PADDED_TO = 16  # tokens of the vocabulary, which slices divide
_TOP = 2  # experts of a token


def warm() -> None:
    """Import what ranks need, behind what lets it run without a GPU."""
    warm_megatron()


def build(given: Combination, vocab_size: int, config: dict[str, Any] | None) -> Megatron:
    """Return a model, with dsx attached if there is a configuration for it."""
    return Megatron(given, vocab_size, config)


class Megatron:
    """One rank."""

    def __init__(self, given: Combination, vocab_size: int, config: dict[str, Any] | None) -> None:
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(
            given.tensor, given.pipeline, given.chunks if given.chunks > 1 else None,
            context_parallel_size=given.context,
            expert_model_parallel_size=given.expert_parallel,
        )  # fmt: skip
        state: Any = parallel_state
        seed = SEED + 100 * state.get_pipeline_model_parallel_rank()  # as Megatron does
        torch.manual_seed(seed)
        seed_slices: Any = tensor_parallel.model_parallel_cuda_manual_seed
        seed_slices(seed, force_reset_rng=True)
        shape = _transformer(given)
        models = [_model(given, shape, vocab_size, index) for index in range(given.chunks)]
        chunks, optimizer = chunks_and_optimizer(shape, models, RATE, _DECAY, given.is_sharded)
        self._chunks, self._optimizer = chunks, optimizer
        self.handle: dsx.Handle | None = None
        if config is not None:
            self.handle = dsx.attach_megatron(chunks, optimizer, config=config)
        self.data_rank: int = state.get_data_parallel_rank()
        self.num_data_ranks: int = state.get_data_parallel_world_size()

    def step(self, batches: Sequence[Tensor]) -> float | None:
        """Take one step."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        loss = self._run(batches, forward_only=False)
        self._optimizer.step()
        return loss

    def evaluate(self, batches: Sequence[Tensor]) -> float | None:
        """Return the mean loss."""
        with torch.no_grad():
            return self._run(batches, forward_only=True)

    def parameters(self) -> Iterable[Tensor]:
        """Yield this rank's slices and stages."""
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                yield parameter.detach()

    def _run(self, batches: Sequence[Tensor], forward_only: bool) -> float | None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        sources = [iter(batches) for _ in self._chunks]  # each reads the same
        is_one = len(self._chunks) == 1
        schedule: Any = get_forward_backward_func()
        told = schedule(
            forward_step_func=_forward_step,
            data_iterator=sources[0] if is_one else sources,
            model=self._chunks[0] if is_one else self._chunks,
            num_microbatches=len(batches), seq_length=SHAPE.sequence_length,
            micro_batch_size=MICRO, forward_only=forward_only,
        )  # fmt: skip
        losses = [one["loss"] for one in told or []]
        return torch.stack(losses).mean().item() if losses else None


def _forward_step(batches: Iterator[Tensor], model: Any) -> Any:
    from megatron.core import parallel_state

    tokens = next(batches)
    length = tokens.shape[1] - 1
    places = torch.arange(length).expand(len(tokens), -1)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    part = own_part({"tokens": tokens[:, :-1], "places": places, "labels": tokens[:, 1:]})
    losses = model(part["tokens"], part["places"], hidden, labels=part["labels"].contiguous())
    state: Any = parallel_state
    group = state.get_context_parallel_group()

    def mean(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        own = output.float().mean() / group.size()  # of the whole sequence, as Megatron's
        whole = own.detach().clone()
        dist.all_reduce(whole, group=group)
        return own, {"loss": whole}

    return losses, mean


def _transformer(given: Combination) -> Any:
    """Return the model's TransformerConfig."""
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if given.is_bf16 else torch.float32
    is_virtual = given.chunks > 1
    of_experts: dict[str, Any] = {}
    if given.experts:
        of_experts = {
            "num_moe_experts": given.experts,
            "expert_model_parallel_size": given.expert_parallel,
            "moe_router_topk": _TOP,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
        }
    return TransformerConfig(
        num_layers=SHAPE.num_layers, hidden_size=SHAPE.hidden_size,
        num_attention_heads=SHAPE.num_heads, ffn_hidden_size=4 * SHAPE.hidden_size,
        tensor_model_parallel_size=given.tensor, pipeline_model_parallel_size=given.pipeline,
        context_parallel_size=given.context,
        virtual_pipeline_model_parallel_size=given.chunks if is_virtual else None,
        # with two stages batched sends are wrong for virtual ones
        overlap_p2p_comm=is_virtual, batch_p2p_comm=not is_virtual,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=given.is_bf16,
        hidden_dropout=0.0, attention_dropout=0.0, attention_softmax_in_fp32=True,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, **of_experts,
    )  # fmt: skip


def _model(given: Combination, shape: Any, vocab_size: int, index: int) -> Any:
    """Return a rank's virtual stage of that number."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    state: Any = parallel_state
    stage, last = state.get_pipeline_model_parallel_rank(), given.pipeline - 1
    vp_stage = index if given.chunks > 1 else None
    spec = _layers(given, shape, vp_stage)
    model: Any = GPTModel(
        shape, spec if given.context == 1 else with_gathered_attention(spec),
        vocab_size=-(-vocab_size // _PADDED_TO) * _PADDED_TO,
        max_sequence_length=SHAPE.sequence_length,
        pre_process=stage == 0 and index == 0,
        post_process=stage == last and index == given.chunks - 1,
        share_embeddings_and_output_weights=False, vp_stage=vp_stage,
    )  # fmt: skip
    return Float16Module(shape, model.cuda()) if given.is_bf16 else model


def _layers(given: Combination, shape: Any, vp_stage: int | None) -> Any:
    """Return the specification of the layers."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    if not given.experts:
        return get_gpt_layer_local_spec()
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 looks for it without asking whether
        moe_utils.te_general_gemm = None  # Transformer Engine is there
    return get_gpt_decoder_block_spec(shape, use_transformer_engine=False, vp_stage=vp_stage)
