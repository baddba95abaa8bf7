"""What makes a tiny Megatron model a GPT-2 (tanh: with fused GELU), a Llama, a Qwen2, a Qwen3, or
one of those with experts."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import silu

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
GROUPED = ("llama", "qwen2", "qwen3", "llama tied", *MIXTURES)  # queries share keys, two by two
EXPERT_FFN, SHARED_FFN = 12, 24  # inner sizes, of an expert and of the shared one
_LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": silu,
    "add_bias_linear": False,
    "layernorm_epsilon": 1e-6,
    "num_query_groups": 2,
}
_ROTARY = {"position_embedding_type": "rope", "rotary_base": 5000}
_NORM = {"normalization": "RMSNorm"}
TRANSFORMERS: dict[str, dict[str, Any]] = {  # of the TransformerConfig
    "gpt2": {},
    "gpt2 tanh": {"bias_activation_fusion": True},
    "llama": _LLAMA,
    "llama tied": {**_LLAMA, "kv_channels": 8},
    "qwen2": {**_LLAMA, "add_qkv_bias": True},
    "qwen3": {**_LLAMA, "qk_layernorm": True, "kv_channels": 8},
    "mixtral": {
        **_LLAMA,
        "moe_layer_freq": 1,
        "moe_shared_expert_intermediate_size": None,
        "moe_ffn_hidden_size": EXPERT_FFN,
    },
    "qwen2_moe": {
        **_LLAMA,
        "add_qkv_bias": True,
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": SHARED_FFN,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": EXPERT_FFN,
    },
    "qwen3_moe": {
        **_LLAMA,
        "qk_layernorm": True,
        "kv_channels": 8,
        "moe_shared_expert_intermediate_size": None,
        "moe_ffn_hidden_size": EXPERT_FFN,
    },
}
SPECS: dict[str, dict[str, Any]] = {  # of the layers
    "llama": _NORM, "llama tied": _NORM, "qwen2": _NORM, "qwen3": {**_NORM, "qk_layernorm": True},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {  # of the GPTModel
    "llama": _ROTARY,
    "llama tied": {**_ROTARY, "seq_len_interpolation_factor": 2.0},
    "qwen2": _ROTARY,
    "qwen3": _ROTARY,
    **dict.fromkeys(MIXTURES, _ROTARY),
}
