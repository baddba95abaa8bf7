"""What a config.json of Hugging Face says of a model, as notes of the Megatron model that it is.

The other direction of family.py, which is its proof: of the notes the config.json is made again,
and what differs from the one that was given is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.engines.megatron_model.experts import KINDS
from dsx.engines.megatron_model.family import FAMILIES, family_of
from dsx.engines.megatron_model.llama import of_llama_3, plain_frequencies
from dsx.engines.megatron_model.notes import ExpertNotes, ModelNotes

_PLAIN: Mapping[str, Any] = {  # what a model computes with, and dsx knows in one form
    "mlp_bias": False, "attention_bias": False, "use_sliding_window": False,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "partial_rotary_factor": 1.0, "qkv_bias": True,
    "quantization_config": None,
}  # fmt: skip
_ELSEWHERE = {  # compared in a form of their own, or of no weight to what is computed
    "architectures", "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "sliding_window",
    "decoder_sparse_step", "mlp_only_layers", "output_router_logits", "attention_dropout",
    "initializer_range", "router_aux_loss_coef", "router_jitter_noise",
}  # fmt: skip
_NO_MATTER = {  # to what is computed
    "_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "pad_token_id",
    "max_window_layers", "pretraining_tp", "task_specific_params", "n_ctx", "rope_parameters",
    "layer_types", "reorder_and_upcast_attn", "head_dim", "num_experts", "num_local_experts",
    "id2label", "label2id",
}  # fmt: skip


def notes_of_config(path: Path) -> ModelNotes:
    """Return the notes of the model that a config.json describes.

    ValueError for a model that Megatron's GPTModel is not, or dsx does not know as such.
    """
    config: dict[str, Any] = json.loads(path.read_text())
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {kind!r}, and dsx makes Megatron checkpoints of "
            f"{', '.join(FAMILIES)}; use Megatron Bridge for others"
        )
    try:
        notes = _gpt2(config) if kind == "gpt2" else _llama(config, kind, path)
    except KeyError as error:
        raise ValueError(f"{path} does not give {error.args[0]}: add it") from None
    _require_same(config, family_of(notes, path.parent).config, path)
    return notes


def unread(path: Path, made: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config.json that nothing was made of, and that dsx does not know.

    `made` is the config.json that the model's notes make.
    """
    config: dict[str, Any] = json.loads(path.read_text())
    known = {*made, *_PLAIN, *_ELSEWHERE, *_NO_MATTER}
    return sorted(name for name in config if name not in known and "summary_" not in name)


def _gpt2(config: Mapping[str, Any]) -> ModelNotes:
    heads, hidden = config["n_head"], config["n_embd"]
    transformer = {
        "num_layers": config["n_layer"],
        "hidden_size": hidden,
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "layernorm_epsilon": config["layer_norm_epsilon"],
        "hidden_dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "init_method_std": config.get("initializer_range", 0.02),
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "bias_activation_fusion": config["activation_function"] == "gelu_new",
    }
    rotary = {"base": None, "percent": None, "is_scaled": False, "interpolation": None}
    return ModelNotes(
        "GPTModel", transformer, "gelu", "learned_absolute", config["n_positions"],
        config["vocab_size"], config["vocab_size"], config.get("tie_word_embeddings", True),
        rotary, [], {},
    )  # fmt: skip


def _llama(config: Mapping[str, Any], kind: str, path: Path) -> ModelNotes:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or hidden // heads
    given = config.get("rope_parameters") or {}  # of transformers 5
    default = {} if kind == "mixtral" else {"rope_theta": 10000.0}  # Mixtral's is another
    base = given.get("rope_theta") or {**default, **config}["rope_theta"]
    scaling = {
        key: value
        for key, value in (config.get("rope_scaling") or given).items()
        if key != "rope_theta"
    }
    rotary = {"base": base, "percent": 1.0, "is_scaled": False, "interpolation": None}
    frequencies = plain_frequencies(base, head // 2)
    how = scaling.get("rope_type") or scaling.get("type") or "default"
    if how == "linear":
        rotary["interpolation"] = scaling["factor"]
    elif how == "llama3":
        rotary |= {"is_scaled": True, "factor": scaling["factor"]}
        frequencies = [of_llama_3(frequency, scaling["factor"]) for frequency in frequencies]
    transformer: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": head,
        "layernorm_epsilon": config["rms_norm_eps"],
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "init_method_std": config.get("initializer_range", 0.02),
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "add_qkv_bias": kind in ("qwen2", "qwen2_moe"),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
    }
    experts = None
    if kind not in ("llama", "qwen2", "qwen3"):
        transformer |= _experts(config, kind)
        experts = ExpertNotes([KINDS[0]], [list(range(transformer["num_moe_experts"]))])
    notes = ModelNotes(
        "GPTModel", transformer, "silu", "rope", config["max_position_embeddings"],
        config["vocab_size"], config["vocab_size"], config.get("tie_word_embeddings", False),
        rotary, frequencies, {}, experts,
    )  # fmt: skip
    made = family_of(notes, path.parent).config["rope_scaling"] or {"rope_type": "default"}
    asked = {"rope_type": how, **{k: v for k, v in scaling.items() if k != "type"}}
    are_whole = float(base).is_integer() and float(rotary["interpolation"] or 1).is_integer()
    if made != asked or not are_whole:
        raise ValueError(
            f"{path}: rotary positions of base {base}, {asked}, have no form in Megatron that dsx "
            f"knows; it has {made}, and takes a base and a factor of interpolation without fraction"
        )
    return notes


def _experts(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    is_mixtral = kind == "mixtral"
    layers = config["num_hidden_layers"]
    count = config.get("num_experts") or config["num_local_experts"]
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    pattern = [int(n not in dense and (n + 1) % step == 0) for n in range(layers)]
    return {
        "num_moe_experts": count,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config[
            "intermediate_size" if is_mixtral else "moe_intermediate_size"
        ],
        "moe_layer_freq": 1 if is_mixtral or all(pattern) else pattern,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
        "moe_input_jitter_eps": config.get("router_jitter_noise") or None,
        "moe_router_pre_softmax": not is_mixtral and not config["norm_topk_prob"],
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"]
        if kind == "qwen2_moe"
        else None,
        "moe_shared_expert_gate": kind == "qwen2_moe",
    }


def _require_same(config: Mapping[str, Any], made: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError for a setting that a Megatron model does not have."""
    wanted = {**_PLAIN, **{k: v for k, v in made.items() if k not in _ELSEWHERE}}
    for name, value in wanted.items():
        found = config.get(name)
        if found is not None and found != value:
            raise ValueError(
                f"{path}: {name}={found!r} has no form in Megatron that dsx knows; it has "
                f"{name}={value!r}"
            )
    is_sliding = (
        config.get("sliding_window") and config.get("use_sliding_window", True) is not False
    )
    if is_sliding or {*(config.get("layer_types") or [])} - {"full_attention"}:
        raise ValueError(
            f"{path}: sliding_window={config.get('sliding_window')!r} has no form in Megatron that "
            "dsx knows; it has full attention"
        )


def flags_of(notes: ModelNotes) -> list[str]:
    """Return the flags of Megatron-LM that make such a model."""
    given: Any = notes.transformer
    values: dict[str, Any] = {
        "num-layers": given["num_layers"],
        "hidden-size": given["hidden_size"],
        "ffn-hidden-size": given["ffn_hidden_size"],
        "num-attention-heads": given["num_attention_heads"],
        "kv-channels": given["kv_channels"],
        "max-position-embeddings": notes.max_length,
        "norm-epsilon": given["layernorm_epsilon"],
        "normalization": given["normalization"],
        "hidden-dropout": given["hidden_dropout"],
        "attention-dropout": given["attention_dropout"],
        "init-method-std": given["init_method_std"],
        "position-embedding-type": notes.positions,
    }
    switches = {
        "untie-embeddings-and-output-weights": not notes.is_tied,
        "disable-bias-linear": not given["add_bias_linear"],
        "swiglu": given["gated_linear_unit"],
        "add-qkv-bias": given.get("add_qkv_bias"),
        "qk-layernorm": given.get("qk_layernorm"),
        "no-bias-gelu-fusion": given.get("bias_activation_fusion") is False,
        "use-rope-scaling": notes.rotary["is_scaled"],
        "group-query-attention": given["num_query_groups"] < given["num_attention_heads"],
    }
    if switches["group-query-attention"]:
        values["num-query-groups"] = given["num_query_groups"]
    if notes.positions == "rope":
        values["rotary-base"] = int(notes.rotary["base"])
        interpolation = notes.rotary["interpolation"]
        values["rotary-seq-len-interpolation-factor"] = interpolation and int(interpolation)
        values["rope-scaling-factor"] = notes.rotary.get("factor")
    if notes.experts is not None:
        frequency = given["moe_layer_freq"]
        values |= {
            "num-experts": given["num_moe_experts"],
            "moe-router-topk": given["moe_router_topk"],
            "moe-ffn-hidden-size": given["moe_ffn_hidden_size"],
            "moe-aux-loss-coeff": given["moe_aux_loss_coeff"],
            "moe-input-jitter-eps": given["moe_input_jitter_eps"],
            "moe-shared-expert-intermediate-size": given["moe_shared_expert_intermediate_size"],
            "moe-layer-freq": str(frequency).replace(" ", "") if frequency != 1 else None,
        }
        switches["moe-router-pre-softmax"] = given["moe_router_pre_softmax"]
        switches["moe-shared-expert-gate"] = given["moe_shared_expert_gate"]
    told = [
        word
        for name, value in values.items()
        if value is not None
        for word in (f"--{name}", f"{value}")
    ]
    return told + [f"--{name}" for name, is_on in switches.items() if is_on]
