"""Llama of Hugging Face and its relatives: rotary positions, RMS norms, SwiGLU, grouped queries.

Qwen2 adds a bias to queries, keys and values, Qwen3 a norm over each head of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from dsx.engines.megatron_model.notes import NOTES, ModelNotes
from dsx.engines.megatron_model.parts import Part, Sizes, norm_name

_LLAMA_3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


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
    if kind != "qwen2":  # which has a bias and no say over the size of a head
        found |= {"head_dim": sizes.head, "attention_bias": False}
    return found


def llama_parts(notes: ModelNotes, held: Collection[str]) -> dict[str, Part]:
    """Return how each weight is made, by its name, in the model's order."""
    sizes = Sizes.of(notes)
    table = (sizes.vocab, sizes.hidden)
    source = "embedding.word_embeddings.weight"
    found = {"model.embed_tokens.weight": Part(source, table, sizes.vocabulary)}
    for layer in range(sizes.layers):
        parts = _layer(notes, sizes, f"decoder.layers.{layer}.", held)
        found |= {f"model.layers.{layer}.{name}": part for name, part in parts}
    found["model.norm.weight"] = sizes.gain("decoder.final_layernorm.weight")
    if not notes.is_tied:
        found["lm_head.weight"] = Part("output_layer.weight", table, sizes.vocabulary)
    return found


def rotary_scaling(notes: ModelNotes, where: Path) -> dict[str, Any] | None:
    """Return how rotary frequencies differ from those of their base, as config.json says it.

    Megatron's own frequencies are in the notes, and have to be those that result; ValueError if
    they are not.
    """
    count = len(notes.frequencies)
    plain = [float(notes.rotary["base"]) ** (-index / count) for index in range(count)]
    scaling = None
    interpolation = notes.rotary["interpolation"]
    if interpolation is not None:  # of positions, beside the frequencies
        scaling = {"rope_type": "linear", "factor": float(interpolation)}
    if notes.rotary["is_scaled"] and not _are_close(plain, notes.frequencies):
        factor = round(plain[-1] / notes.frequencies[-1], 3)
        scaled = {"rope_type": "llama3", "factor": factor, **_LLAMA_3}
        plain = [_of_llama_3(frequency, factor) for frequency in plain]
        scaling = scaled if scaling is None else {}
    if not _are_close(plain, notes.frequencies) or scaling == {}:
        raise ValueError(
            f"{where / NOTES}: rotary positions of base {notes.rotary['base']}, scaled as in Llama "
            f"3: {notes.rotary['is_scaled']}, interpolated by {interpolation} have frequencies "
            "that no config.json gives; dsx export --out DIR writes the weights under Megatron's "
            "names"
        )
    return scaling


def _of_llama_3(frequency: float, factor: float) -> float:
    """Return a frequency as Llama 3 scales it: long waves by the factor, short ones not."""
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    turns = _LLAMA_3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return (1 - share) * frequency / factor + share * frequency


def _are_close(a: list[float], b: list[float]) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-5) for x, y in pairs)


def _layer(
    notes: ModelNotes, sizes: Sizes, layer: str, held: Collection[str]
) -> Iterator[tuple[str, Part]]:
    hidden, ffn = sizes.hidden, sizes.ffn
    attention, mlp = f"{layer}self_attention.", f"{layer}mlp."
    qkv, fc1 = f"{attention}linear_qkv", f"{mlp}linear_fc1"
    rows = (sizes.queries, sizes.keys, sizes.keys)

    def third(index: int) -> Callable[[Tensor], Tensor]:
        def take(whole: Tensor) -> Tensor:
            return sizes.split(whole)[index]

        return take

    def half(index: int) -> Callable[[Tensor], Tensor]:
        def take(whole: Tensor) -> Tensor:
            return whole.chunk(2)[index]

        return take

    gain = norm_name(held, f"{layer}input_layernorm", qkv, "weight")
    yield "input_layernorm.weight", sizes.gain(gain)
    for index, (letter, count) in enumerate(zip("qkv", rows, strict=True)):
        part = Part(f"{qkv}.weight", (count, hidden), third(index))
        yield f"self_attn.{letter}_proj.weight", part
    for index, (letter, count) in enumerate(zip("qkv", rows, strict=True)):
        if notes.transformer.get("add_qkv_bias"):
            yield f"self_attn.{letter}_proj.bias", Part(f"{qkv}.bias", (count,), third(index))
    if notes.transformer.get("qk_layernorm"):
        for letter in "qk":
            name = f"{attention}{letter}_layernorm.weight"
            yield f"self_attn.{letter}_norm.weight", sizes.gain_of(name, sizes.head)
    projection = (hidden, sizes.queries)
    yield "self_attn.o_proj.weight", Part(f"{attention}linear_proj.weight", projection)
    gain = norm_name(held, f"{layer}pre_mlp_layernorm", fc1, "weight")
    yield "post_attention_layernorm.weight", sizes.gain(gain)
    yield "mlp.gate_proj.weight", Part(f"{fc1}.weight", (ffn, hidden), half(0))
    yield "mlp.up_proj.weight", Part(f"{fc1}.weight", (ffn, hidden), half(1))
    yield "mlp.down_proj.weight", Part(f"{mlp}linear_fc2.weight", (hidden, ffn))
