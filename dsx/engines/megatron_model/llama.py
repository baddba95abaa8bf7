"""Llama of Hugging Face and its relatives: rotary positions, RMS norms, SwiGLU, grouped queries.

Qwen2 adds a bias to queries, keys and values, Qwen3 a norm over each head of queries and keys;
Mixtral and the Qwens of experts have these in the place of the MLP (mixture.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from dsx.engines.megatron_model.mixture import dense_layers, mixture, mixture_config, mlp
from dsx.engines.megatron_model.notes import NOTES, ModelNotes
from dsx.engines.megatron_model.parts import Match, Sizes, norm_name

_LLAMA_3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}  # fmt: skip


def llama_config(notes: ModelNotes, kind: str, where: Path) -> dict[str, Any]:
    """Return what config.json says of a model of type `kind`.

    ValueError, which names the checkpoint's directory, for rotary positions that cannot be said.
    """
    sizes, given = Sizes.of(notes), notes.transformer
    found = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": notes.max_length,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "hidden_act": "silu",
        "rms_norm_eps": given["layernorm_epsilon"],
        "rope_theta": float(notes.rotary["base"]),
        "rope_scaling": rotary_scaling(notes, where),
        "attention_dropout": given["attention_dropout"],
        "initializer_range": given["init_method_std"],
        "tie_word_embeddings": notes.is_tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind not in ("qwen2", "qwen2_moe"):  # which have a bias and no say over the size of a head
        found |= {"head_dim": sizes.head, "attention_bias": False}
    return found | mixture_config(notes, kind)


def llama_matches(notes: ModelNotes, kind: str, held: Collection[str]) -> Iterator[Match]:
    """Yield every weight of Megatron's with those of Hugging Face, in the model's order."""
    sizes, dense = Sizes.of(notes), dense_layers(notes)
    yield sizes.table("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(sizes.layers):
        theirs, ours = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield from _attention(notes, sizes, theirs, ours, held)
        gain = norm_name(held, f"{theirs}pre_mlp_layernorm", f"{theirs}mlp.linear_fc1", "weight")
        yield sizes.gain(gain, f"{ours}post_attention_layernorm.weight")
        if layer in dense:
            yield from mlp(f"{theirs}mlp.", f"{ours}mlp.", sizes.ffn, sizes.hidden)
        else:
            yield from mixture(notes, kind, theirs, ours)
    yield sizes.gain("decoder.final_layernorm.weight", "model.norm.weight")
    if not notes.is_tied:
        yield sizes.table("output_layer.weight", "lm_head.weight")


def rotary_scaling(notes: ModelNotes, where: Path) -> dict[str, Any] | None:
    """Return how rotary frequencies differ from those of their base, as config.json says it.

    Megatron's own frequencies are in the notes, and have to be those that result; ValueError if
    they are not.
    """
    plain = plain_frequencies(notes.rotary["base"], len(notes.frequencies))
    scaling = None
    interpolation = notes.rotary["interpolation"]
    if interpolation is not None:  # of positions, beside the frequencies
        scaling = {"rope_type": "linear", "factor": float(interpolation)}
    if notes.rotary["is_scaled"] and not _are_close(plain, notes.frequencies):
        factor = round(plain[-1] / notes.frequencies[-1], 3)
        scaled = {"rope_type": "llama3", "factor": factor, **_LLAMA_3}
        plain = [of_llama_3(frequency, factor) for frequency in plain]
        scaling = scaled if scaling is None else {}
    if not _are_close(plain, notes.frequencies) or scaling == {}:
        raise ValueError(
            f"{where / NOTES}: rotary positions of base {notes.rotary['base']}, scaled as in Llama "
            f"3: {notes.rotary['is_scaled']}, interpolated by {interpolation} have frequencies "
            "that no config.json gives; dsx export --out DIR writes the weights under Megatron's "
            "names"
        )
    return scaling


def plain_frequencies(base: float, count: int) -> list[float]:
    """Return rotary positions' frequencies, of half a head's size."""
    return [float(base) ** (-index / count) for index in range(count)]


def of_llama_3(frequency: float, factor: float) -> float:
    """Return a frequency as Llama 3 scales it: long waves by the factor, short ones not."""
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    turns = _LLAMA_3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return (1 - share) * frequency / factor + share * frequency


def _are_close(a: list[float], b: list[float]) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-5) for x, y in pairs)


def _attention(
    notes: ModelNotes, sizes: Sizes, layer: str, ours: str, held: Collection[str]
) -> Iterator[Match]:
    attention, given = f"{layer}self_attention.", notes.transformer
    qkv, hidden = f"{attention}linear_qkv", sizes.hidden
    rows = {"q": sizes.queries, "k": sizes.keys, "v": sizes.keys}

    def three(what: str, *columns: int) -> Match:
        shapes = {
            f"{ours}self_attn.{letter}_proj.{what}": (count, *columns)
            for letter, count in rows.items()
        }
        return Match(f"{qkv}.{what}", shapes, sizes.split, sizes.interleave)

    gain = norm_name(held, f"{layer}input_layernorm", qkv, "weight")
    yield sizes.gain(gain, f"{ours}input_layernorm.weight")
    yield three("weight", hidden)
    if given.get("add_qkv_bias"):
        yield three("bias")
    if given.get("qk_layernorm"):
        for letter in "qk":
            name = f"{attention}{letter}_layernorm.weight"
            yield sizes.gain(name, f"{ours}self_attn.{letter}_norm.weight", sizes.head)
    projection = {f"{ours}self_attn.o_proj.weight": (hidden, sizes.queries)}
    yield Match(f"{attention}linear_proj.weight", projection)
