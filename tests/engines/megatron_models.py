"""Megatron's other models, tiny: BERT, T5, hybrids, and a GPT that predicts one token more."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OTHER = ("bert", "t5", "mtp", "hybrid", "own")
# of the TransformerConfig
OF_STATES = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2}
SETTINGS = {"mtp": {"mtp_num_layers": 1}, "hybrid": {**OF_STATES, "is_hybrid_model": True}}


def build_other(kind: Any, config: Any, vp_stage: int | None, **common: Any) -> Any:
    """Return the chunk of a model of another family; `common` are what all models take."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.models.T5 import T5Model, t5_spec

    common["share_embeddings_and_output_weights"] = kind.is_tied
    if kind.family == "bert":
        return BertModel(config, 2, bert_layer_local_spec, vp_stage=vp_stage, **common)
    if kind.family == "t5":
        encoder = copy.deepcopy(config)
        specs = (
            t5_spec.get_t5_encoder_with_local_block_spec(encoder.num_layers),
            t5_spec.get_t5_decoder_with_local_block_spec(config.num_layers),
        )
        return T5Model(config, encoder, *specs, **common)
    if kind.family == "hybrid":
        leave_triton_out()
        from tests.engines.megatron_hybrid import build_hybrid

        return build_hybrid(config, **common)
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    if kind.family == "own":
        return own_model(config, GPTModel(config, layer, **common))
    more = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, False, vp_stage=vp_stage)
    common["position_embedding_type"] = "rope"
    return GPTModel(config, layer, mtp_block_spec=more, vp_stage=vp_stage, **common)


def own_model(config: Any, language: Any) -> Any:
    """Return a model of a script's own, in parts whose names dsx has never seen."""
    from megatron.core.transformer.module import MegatronModule

    class Reader(MegatronModule):
        """A language model of positions that were looked at before."""

        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = language.model_type  # for which Megatron's schedules ask
            self.eye = torch.nn.Linear(config.hidden_size, config.hidden_size)
            self.tongue = language

        def set_input_tensor(self, given: Any) -> None:
            """Hand on what a stage before has made: nothing."""
            self.tongue.set_input_tensor(given)

        def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, labels: Tensor) -> Any:
            """Return the losses `[batch, length]`."""
            seen = self.tongue.embedding(tokens, positions)
            seen = seen + torch.tanh(self.eye(seen))
            return self.tongue(tokens, positions, mask, decoder_input=seen, labels=labels)

    return Reader()


def leave_triton_out() -> None:
    """Let Megatron's mixer be imported without triton, whose kernels are of inference."""
    name = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
    if importlib.util.find_spec("triton") is None and name not in sys.modules:
        sys.modules[name] = kernels = ModuleType(name)
        for kernel in ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"):
            setattr(kernels, kernel, None)


def outcome(model: Any, windows: Tensor) -> tuple[Any, Callable[[Any], tuple[Tensor, Any]]] | None:
    """Return what a BERT or T5 makes of windows of tokens, and its loss; None of another."""
    from dsx.engines.megatron.parameters import unwrapped

    kind = type(unwrapped(model)).__name__
    tokens, labels = windows[:, :-1], windows[:, 1:]
    if kind == "BertModel":
        types = (torch.arange(tokens.shape[1]) >= 4).long().expand_as(tokens)
        made = model(tokens, torch.ones_like(tokens), tokentype_ids=types, lm_labels=labels)
        first = windows[:, 0] % 2
        return made, lambda output: _told(
            output[0].float().mean() + F.cross_entropy(output[1].view(-1, 2).float(), first)
        )
    if kind == "T5Model":
        hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        seen = torch.zeros_like(hidden)[None, None].expand(len(tokens), -1, -1, -1)
        masks = (seen, hidden[None, None].expand_as(seen), seen)
        made = model(tokens, tokens, *masks, lm_labels=labels)
        return made, lambda output: _told(output.float().mean())
    return None


def _told(loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return loss, {"loss": loss.detach().clone()}
