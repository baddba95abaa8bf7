"""Which architecture of Hugging Face a Megatron model is; what none of them has is refused by name.

Learned positions make it a GPT-2, rotary ones a Llama, a Qwen2 (with a bias of queries, keys and
values) or a Qwen3 (with norms over their heads). Every setting of a TransformerConfig that changes
what a model computes is asked for; those that a release of Megatron does not have are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dsx.engines.megatron_model.gpt2 import gpt2_config, gpt2_parts
from dsx.engines.megatron_model.llama import llama_config, llama_parts
from dsx.engines.megatron_model.notes import NOTES, ModelNotes
from dsx.engines.megatron_model.parts import Part

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
_OTHERWISE = "dsx export --out DIR writes the weights under Megatron's names"
Rules = Mapping[str, tuple[Any, str]]  # to each setting its value, and the flags that give it
_COMMON: Rules = {
    "multi_latent_attention": (False, "no --multi-latent-attention"),
    "num_moe_experts": (None, "no --num-experts"),
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


@dataclass(frozen=True)
class Family:
    """An architecture: its model_type, its config.json, and how each of its weights is made.

    `parts` is given the names that the run holds.
    """

    kind: str
    config: dict[str, Any]
    parts: Callable[[Collection[str]], dict[str, Part]]


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
        return Family("gpt2", gpt2_config(notes), partial(gpt2_parts, notes))
    if notes.positions != "rope":
        raise ValueError(
            f"{where / NOTES}: position_embedding_type={notes.positions!r} of Megatron has no form "
            f"in {', '.join(FAMILIES)} of Hugging Face's transformers, which have "
            f"'learned_absolute' and 'rope'; {_OTHERWISE}"
        )
    has_bias, has_norms = given.get("add_qkv_bias"), given.get("qk_layernorm")
    kind = "qwen3" if has_norms else "qwen2" if has_bias else "llama"
    rules = {**_COMMON, **_LLAMA}
    if kind == "qwen3":
        rules["add_qkv_bias"] = (False, "no --add-qkv-bias with --qk-layernorm")
    if kind == "qwen2":
        rules |= _whole_heads(given, is_grouped=True)
    _require(given, rules, kind, where)
    return Family(kind, llama_config(notes, kind, where), partial(llama_parts, notes))


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
