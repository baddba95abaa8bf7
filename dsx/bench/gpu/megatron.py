"""A small GPT of megatron-core, as `megatron.training` makes one: bf16, and local layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsx.bench.megatron_chunk import chunk_and_optimizer
from dsx.examples.gpt import GPTConfig

_DECAY = 0.01


def make(shape: GPTConfig, rate: float, is_sharded: bool, is_bf16: bool) -> tuple[Any, Any]:
    """Return a chunk under Megatron's DDP and its Adam, the distributed one if `is_sharded`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads, ffn_hidden_size=4 * shape.hidden_size,
        hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, bf16=is_bf16,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
    )  # fmt: skip
    model: Any = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=shape.vocab_size,
        max_sequence_length=shape.sequence_length,
    )  # fmt: skip
    if is_bf16:
        model = Float16Module(config, model.cuda())
    return chunk_and_optimizer(config, model, rate, _DECAY, is_sharded)


def forward_backward(chunk: Any, tokens: Tensor) -> Tensor:
    """Compute the gradients of tokens `[rows, length + 1]`; return their mean loss, 0-dim."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    length = tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device).expand(len(tokens), -1)
    hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return losses.float().mean(), {"loss": losses.detach().float().mean()}

    def forward(batches: Any, model: Any) -> Any:
        given = next(batches)
        labels = given[:, 1:].contiguous()
        return model(given[:, :-1], positions, hidden[None, None], labels=labels), mean

    schedule: Any = get_forward_backward_func()
    (told,) = schedule(
        forward_step_func=forward, data_iterator=iter([tokens]), model=[chunk],
        num_microbatches=1, seq_length=length, micro_batch_size=len(tokens), forward_only=False,
    )  # fmt: skip
    return told["loss"]
