"""GPT-2 of Hugging Face: learned positions, layer norms, GELU, a bias everywhere.

Its linear layers are transposed: [in, out]. Megatron computes GELU by tanh where it fuses it with
the bias, and by erf elsewhere; GPT-2 has both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from dsx.engines.megatron_model.notes import ModelNotes
from dsx.engines.megatron_model.parts import Part, Sizes, joined_rows, norm_name


def gpt2_config(notes: ModelNotes) -> dict[str, Any]:
    """Return what config.json says."""
    sizes, given = Sizes.of(notes), notes.transformer
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes.vocab,
        "n_positions": notes.max_length,
        "n_embd": sizes.hidden,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_inner": sizes.ffn,
        "activation_function": "gelu_new" if given.get("bias_activation_fusion") else "gelu",
        "layer_norm_epsilon": given["layernorm_epsilon"],
        "resid_pdrop": given["hidden_dropout"],
        "embd_pdrop": given["hidden_dropout"],
        "attn_pdrop": given["attention_dropout"],
        "initializer_range": given["init_method_std"],
        "tie_word_embeddings": notes.is_tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def gpt2_parts(notes: ModelNotes, held: Collection[str]) -> dict[str, Part]:
    """Return how each weight is made, by its name, in the model's order."""
    sizes = Sizes.of(notes)
    table = (sizes.vocab, sizes.hidden)
    found = {
        "transformer.wte.weight": Part("embedding.word_embeddings.weight", table, sizes.vocabulary),
        "transformer.wpe.weight": Part(
            "embedding.position_embeddings.weight", (notes.max_length, sizes.hidden)
        ),
    }
    for layer in range(sizes.layers):
        parts = _layer(sizes, f"decoder.layers.{layer}.", held)
        found |= {f"transformer.h.{layer}.{name}": part for name, part in parts}
    found["transformer.ln_f.weight"] = sizes.gain("decoder.final_layernorm.weight")
    found["transformer.ln_f.bias"] = Part("decoder.final_layernorm.bias", (sizes.hidden,))
    if not notes.is_tied:
        found["lm_head.weight"] = Part("output_layer.weight", table, sizes.vocabulary)
    return found


def _layer(sizes: Sizes, layer: str, held: Collection[str]) -> Iterator[tuple[str, Part]]:
    hidden, ffn = sizes.hidden, sizes.ffn
    attention, mlp = f"{layer}self_attention.", f"{layer}mlp."

    def norm(ours: str, apart: str, inside: str) -> Iterator[tuple[str, Part]]:
        gain, bias = (norm_name(held, layer + apart, inside, w) for w in ("weight", "bias"))
        yield f"{ours}.weight", sizes.gain(gain)
        yield f"{ours}.bias", Part(bias, (hidden,))

    def linear(ours: str, theirs: str, columns: int, rows: int) -> Iterator[tuple[str, Part]]:
        yield f"{ours}.weight", Part(f"{theirs}.weight", (columns, rows), Tensor.t)
        yield f"{ours}.bias", Part(f"{theirs}.bias", (rows,))

    def apart(whole: Tensor) -> Tensor:
        return joined_rows(sizes.split(whole))

    yield from norm("ln_1", "input_layernorm", f"{attention}linear_qkv")
    yield (
        "attn.c_attn.weight",
        Part(f"{attention}linear_qkv.weight", (hidden, 3 * hidden), lambda w: apart(w).t()),
    )
    yield "attn.c_attn.bias", Part(f"{attention}linear_qkv.bias", (3 * hidden,), apart)
    yield from linear("attn.c_proj", f"{attention}linear_proj", hidden, hidden)
    yield from norm("ln_2", "pre_mlp_layernorm", f"{mlp}linear_fc1")
    yield from linear("mlp.c_fc", f"{mlp}linear_fc1", hidden, ffn)
    yield from linear("mlp.c_proj", f"{mlp}linear_fc2", ffn, hidden)
