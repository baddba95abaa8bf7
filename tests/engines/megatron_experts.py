"""A mixture of experts in Megatron's layers on the CPU, and the same layer in plain torch.

Megatron initialises experts on the CPU alike on all expert-parallel ranks: here each gets values of
its own. Its norms without Transformer Engine refuse sequence parallelism, which it demands for
experts beside tensor parallelism: `TokenNorm` is a stand-in of ours, marked as Megatron marks its.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOP = 2  # experts of each token
BIAS_RATE = 0.02  # of the router's bias, by step: enough to change which experts are chosen
BIASED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": BIAS_RATE,
}
_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..*)")


class TokenNorm:
    """A norm whose gradients Megatron sums over tensor-parallel ranks, each of other tokens."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def expert_settings(kind: Any) -> dict[str, Any]:
    """What of TransformerConfig is of experts."""
    if not kind.experts:
        return {}
    slices = kind.expert_tensor or kind.tensor
    is_cut = slices > 1 and kind.expert_parallel > 1  # gloo gathers no unequal numbers of tokens
    return {
        "num_moe_experts": kind.experts,
        "expert_model_parallel_size": kind.expert_parallel,
        "expert_tensor_parallel_size": slices,
        "moe_router_topk": TOP,
        "moe_shared_expert_intermediate_size": kind.ffn,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather" if is_cut else "alltoall",
        "moe_layer_freq": [index % 2 for index in range(kind.num_layers)],  # others are dense
        "sequence_parallel": kind.tensor > 1,
        "add_bias_linear": False,
        **(BIASED if kind.is_biased else {}),
    }


def layers_with_experts(kind: Any, config: Any, vp_stage: int | None) -> Any:
    """Return the specification of this stage's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 looks for it without asking whether
        moe_utils.te_general_gemm = None  # Transformer Engine is there
    spec = get_gpt_decoder_block_spec(
        config, False, normalization=config.normalization, vp_stage=vp_stage
    )
    if config.sequence_parallel:
        spec.layer_norm = TokenNorm
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TokenNorm
            attention = layer.submodules.self_attention.submodules
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = TokenNorm
    return spec


@torch.no_grad()
def tell_experts_apart(model: nn.Module, config: Any, seed: int) -> None:
    """Draw this rank's experts, each by its number among all and its slice, in place."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    cut = parallel_state.get_expert_tensor_parallel_rank()
    for name, parameter in model.named_parameters():
        if _EXPERT.match(name):
            whole = f"{seed} {stage} {cut} {in_whole_layer(name, config)}"
            generator = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def expert_number(local: int, config: Any) -> int:
    """The number among all of a layer's experts of one on this rank."""
    from megatron.core import parallel_state

    count = config.num_moe_experts // config.expert_model_parallel_size
    return parallel_state.get_expert_model_parallel_rank() * count + local


def in_whole_layer(name: str, config: Any) -> str:
    """Return a weight's name with the number of its expert among all, if it is an expert's."""
    match = _EXPERT.match(name)
    return f"{match[1]}{expert_number(int(match[2]), config)}{match[3]}" if match else name


def mixture(x: Tensor, w: Mapping[str, Tensor], load: dict[int, Tensor]) -> Tensor:
    """What experts make of tokens `[..., hidden]`: the router's best, by weight, and the shared.

    Where the router has a bias, the tokens of each expert are added to `load`, by the bias's id.
    """

    def outcome(expert: str) -> Tensor:
        inner = F.gelu(F.linear(x, w[f"mlp.{expert}.linear_fc1.weight"]))
        return F.linear(inner, w[f"mlp.{expert}.linear_fc2.weight"])

    shares, chosen = chosen_experts(F.linear(x, w["mlp.router.weight"]), w, load)
    total = outcome("shared_experts")
    for number in range(w["mlp.router.weight"].shape[0]):
        share = (shares * (chosen == number)).sum(-1, keepdim=True)
        total = total + share * outcome(f"experts.local_experts.{number}")
    return total


def chosen_experts(
    logits: Tensor, w: Mapping[str, Tensor], load: dict[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return each token's experts `[..., TOP]` and the weight of each."""
    bias = w.get("mlp.router.expert_bias")
    if bias is None:
        scores, chosen = logits.topk(TOP, dim=-1)
        return scores.softmax(-1), chosen
    scores = logits.sigmoid()
    chosen = (scores + bias).topk(TOP, dim=-1).indices
    counted = torch.bincount(chosen.flatten(), minlength=len(bias))
    load[id(bias)] = load.get(id(bias), torch.zeros_like(counted)) + counted
    held = scores.gather(-1, chosen)
    return held / (held.sum(-1, keepdim=True) + 1e-20), chosen


@torch.no_grad()
def move_biases(weights: Mapping[str, Tensor], load: dict[int, Tensor]) -> None:
    """Move every router's bias towards the experts that had fewer tokens, in place; forget them."""
    for name, bias in weights.items():
        if name.endswith("router.expert_bias"):
            tokens = load.pop(id(bias)).float()
            bias += BIAS_RATE * (tokens.mean() - tokens).sign()
