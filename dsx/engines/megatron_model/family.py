"""Which architecture of Hugging Face a Megatron model is; what none of them has is refused by name.

Learned positions make it a GPT-2, rotary ones a Llama, a Qwen2 (with a bias of queries, keys and
values) or a Qwen3 (with norms over their heads); experts a Mixtral, a Qwen3-MoE (with such norms)
or a Qwen2-MoE (with a shared expert). Every setting of a TransformerConfig that changes
what a model computes is asked for; those that a release of Megatron does not have are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dsx.engines.megatron_model.gpt2 import gpt2_config, gpt2_matches
from dsx.engines.megatron_model.llama import llama_config, llama_matches
from dsx.engines.megatron_model.mixture import dense_layers
from dsx.engines.megatron_model.notes import NOTES, ModelNotes
from dsx.engines.megatron_model.parts import Match

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
_OTHERWISE = "dsx export --out DIR writes the weights under Megatron's names"
Rules = Mapping[str, tuple[Any, str]]  # to each setting its value, and the flags that give it
_COMMON: Rules = {
    "multi_latent_attention": (False, "no --multi-latent-attention"),
    "mtp_num_layers": (None, "no --mtp-num-layers"),
    "apply_residual_connection_post_layernorm": (False, "layers as they are by default"),
    "qk_l2_norm": (False, "no --qk-l2-norm"),
    "attention_output_gate": (False, "no --attention-output-gate"),
    "window_size": (None, "no --window-size"),
    "softmax_type": ("vanilla", "no --softmax-type"),
    "softmax_scale": (None, "the scale of softmax as it is by default"),
    "no_rope_freq": (None, "no --no-rope-freq"),
    "rotary_interleaved": (False, "no --rotary-interleaved"),
    "glu_linear_offset": (0.0, "no --glu-linear-offset"),
    "activation_func_clamp_value": (None, "no --activation-func-clamp-value"),
    "experimental_attention_variant": (None, "no --experimental-attention-variant"),
    "linear_attention_type": (None, "no --linear-attention-type"),
    "linear_attention_freq": (None, "no --linear-attention-freq"),
    "heterogeneous_block_specs": (False, "layers that are all alike"),
    "use_mup": (False, "no --use-mup"),
}
_GPT2: Rules = {
    "num_moe_experts": (None, "no --num-experts"),
    "normalization": ("LayerNorm", "--normalization LayerNorm"),
    "add_bias_linear": (True, "no --disable-bias-linear"),
    "gated_linear_unit": (False, "no --swiglu"),
    "activation": ("gelu", "no --swiglu and no --squared-relu"),
    "use_te_activation_func": (False, "no --use-te-activation-func"),
    "qk_layernorm": (False, "no --qk-layernorm"),
}
_LLAMA: Rules = {
    "normalization": ("RMSNorm", "--normalization RMSNorm"),
    "add_bias_linear": (False, "--disable-bias-linear"),
    "gated_linear_unit": (True, "--swiglu"),
    "activation": ("silu", "--swiglu"),
    "rotary_percent": (1.0, "--rotary-percent 1.0"),
}
_EXPERTS: Rules = {
    "moe_router_score_function": ("softmax", "--moe-router-score-function softmax"),
    "moe_router_num_groups": (None, "no --moe-router-num-groups"),
    "moe_router_group_topk": (None, "no --moe-router-group-topk"),
    "moe_router_topk_limited_devices": (None, "no --moe-router-topk-limited-devices"),
    "moe_router_topk_scaling_factor": (None, "no --moe-router-topk-scaling-factor"),
    "moe_router_enable_expert_bias": (False, "no --moe-router-enable-expert-bias"),
    "moe_router_force_load_balancing": (False, "no --moe-router-force-load-balancing"),
    "moe_expert_capacity_factor": (None, "no --moe-expert-capacity-factor"),
    "moe_apply_probs_on_input": (False, "no --moe-apply-probs-on-input"),
    "moe_latent_size": (None, "no --moe-latent-size"),
}
_NO_BIAS: Rules = {"add_qkv_bias": (False, "no --add-qkv-bias")}
_OF_KIND: Mapping[str, Rules] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"add_qkv_bias": (False, "no --add-qkv-bias with --qk-layernorm")},
    "mixtral": {
        **_EXPERTS,
        **_NO_BIAS,
        "moe_router_pre_softmax": (False, "no --moe-router-pre-softmax"),
    },
    "qwen2_moe": {
        **_EXPERTS,
        "add_qkv_bias": (True, "--add-qkv-bias"),
        "qk_layernorm": (False, "no --qk-layernorm"),
        "moe_shared_expert_gate": (True, "--moe-shared-expert-gate"),
    },
    "qwen3_moe": {**_EXPERTS, **_NO_BIAS},
}


@dataclass(frozen=True)
class Family:
    """An architecture: its model_type, its config.json, and how each of its weights is made.

    `matches` is given the names that the run holds.
    """

    kind: str
    config: dict[str, Any]
    matches: Callable[[Collection[str]], Iterator[Match]]


def family_of(notes: ModelNotes, where: Path) -> Family:
    """Return the architecture of a model; ValueError, naming the setting, for what none has.

    `where` is the checkpoint's directory, for messages.
    """
    if notes.kind != "GPTModel":
        raise ValueError(
            f"{where / NOTES}: the model is a {notes.kind}, and dsx knows the form of Megatron's "
            f"GPTModel in Hugging Face's transformers ({', '.join(FAMILIES)}); {_OTHERWISE}"
        )
    given = {
        **notes.transformer,
        "activation": notes.activation,
        "rotary_percent": notes.rotary["percent"],
    }
    if notes.positions == "learned_absolute":
        rules = {**_COMMON, **_GPT2, **_whole_heads(given, is_grouped=False)}
        _require(given, rules, "gpt2", where)
        return Family("gpt2", gpt2_config(notes), partial(gpt2_matches, notes))
    if notes.positions != "rope":
        raise ValueError(
            f"{where / NOTES}: position_embedding_type={notes.positions!r} of Megatron has no form "
            f"in {', '.join(FAMILIES)} of Hugging Face's transformers, which have "
            f"'learned_absolute' and 'rope'; {_OTHERWISE}"
        )
    kind = _kind(given)
    rules = {**_COMMON, **_LLAMA, **_OF_KIND[kind]}
    if kind in ("qwen2", "qwen2_moe"):
        rules |= _whole_heads(given, is_grouped=True)
    if "sinkhorn" in given.get("moe_router_load_balancing_type", ""):
        rules["moe_router_load_balancing_type"] = ("aux_loss", "a loss that balances, or none")
    if kind == "mixtral" and (dense := dense_layers(notes)):
        raise ValueError(
            f"{where / NOTES}: layers {dense} have no experts, and all layers of a mixtral of "
            f"Hugging Face's transformers have (--moe-layer-freq 1); {_OTHERWISE}"
        )
    _require(given, rules, kind, where)
    return Family(kind, llama_config(notes, kind, where), partial(llama_matches, notes, kind))


def _kind(given: Mapping[str, Any]) -> str:
    """Return the model_type of a model of rotary positions."""
    has_bias, has_norms = given.get("add_qkv_bias"), given.get("qk_layernorm")
    if given.get("num_moe_experts") is None:
        return "qwen3" if has_norms else "qwen2" if has_bias else "llama"
    if given.get("moe_shared_expert_intermediate_size") is not None:
        return "qwen2_moe"
    return "qwen3_moe" if has_norms else "mixtral"


def _whole_heads(given: Mapping[str, Any], is_grouped: bool) -> Rules:
    """Return the rules of families whose heads make up the hidden size, and may not be grouped."""
    heads = given["num_attention_heads"]
    rules: dict[str, tuple[Any, str]] = {
        "kv_channels": (given["hidden_size"] // heads, "no --kv-channels")
    }
    if not is_grouped:
        rules["num_query_groups"] = (heads, "no --group-query-attention")
    return rules


def _require(given: Mapping[str, Any], rules: Rules, kind: str, where: Path) -> None:
    for name, (value, flags) in rules.items():
        found = given.get(name, value)
        if found != value:
            raise ValueError(
                f"{where / NOTES}: {name}={found!r} of Megatron has no form in {kind} of Hugging "
                f"Face's transformers, which has {name}={value!r} ({flags}); {_OTHERWISE}"
            )
