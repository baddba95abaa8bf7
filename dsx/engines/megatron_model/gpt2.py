"""GPT-2 of Hugging Face: learned positions, layer norms, GELU, a bias everywhere.

Its linear layers are transposed: [in, out]. Megatron computes GELU by tanh where it fuses it with
the bias, and by erf elsewhere; GPT-2 has both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from dsx.engines.megatron_model.notes import ModelNotes
from dsx.engines.megatron_model.parts import Match, Sizes, norm_name


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


def gpt2_matches(notes: ModelNotes, held: Collection[str]) -> Iterator[Match]:
    """Yield every weight of Megatron's with those of Hugging Face, in the model's order."""
    sizes = Sizes.of(notes)
    yield sizes.table("embedding.word_embeddings.weight", "transformer.wte.weight")
    positions = {"transformer.wpe.weight": (notes.max_length, sizes.hidden)}
    yield Match("embedding.position_embeddings.weight", positions)
    for layer in range(sizes.layers):
        yield from _layer(sizes, f"decoder.layers.{layer}.", f"transformer.h.{layer}.", held)
    yield sizes.gain("decoder.final_layernorm.weight", "transformer.ln_f.weight")
    yield Match("decoder.final_layernorm.bias", {"transformer.ln_f.bias": (sizes.hidden,)})
    if not notes.is_tied:
        yield sizes.table("output_layer.weight", "lm_head.weight")


def _layer(sizes: Sizes, layer: str, ours: str, held: Collection[str]) -> Iterator[Match]:
    hidden, ffn = sizes.hidden, sizes.ffn
    attention, mlp = f"{layer}self_attention.", f"{layer}mlp."
    qkv = f"{attention}linear_qkv"

    def norm(name: str, apart: str, inside: str) -> Iterator[Match]:
        gain, bias = (norm_name(held, layer + apart, inside, w) for w in ("weight", "bias"))
        yield sizes.gain(gain, f"{ours}{name}.weight")
        yield Match(bias, {f"{ours}{name}.bias": (hidden,)})

    def linear(name: str, theirs: str, columns: int, rows: int) -> Iterator[Match]:
        shape = {f"{ours}{name}.weight": (columns, rows)}
        yield Match(f"{theirs}.weight", shape, lambda w: [w.t()], lambda parts: parts[0].t())
        yield Match(f"{theirs}.bias", {f"{ours}{name}.bias": (rows,)})

    yield from norm("ln_1", "input_layernorm", qkv)
    yield Match(
        f"{qkv}.weight",
        {f"{ours}attn.c_attn.weight": (hidden, 3 * hidden)},
        lambda whole: [torch.cat(sizes.split(whole)).t()],
        lambda parts: sizes.interleave(parts[0].t().chunk(3)),
    )
    yield Match(
        f"{qkv}.bias",
        {f"{ours}attn.c_attn.bias": (3 * hidden,)},
        lambda whole: [torch.cat(sizes.split(whole))],
        lambda parts: sizes.interleave(parts[0].chunk(3)),
    )
    yield from linear("attn.c_proj", f"{attention}linear_proj", hidden, hidden)
    yield from norm("ln_2", "pre_mlp_layernorm", f"{mlp}linear_fc1")
    yield from linear("mlp.c_fc", f"{mlp}linear_fc1", hidden, ffn)
    yield from linear("mlp.c_proj", f"{mlp}linear_fc2", ffn, hidden)
