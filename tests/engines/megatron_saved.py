"""A Megatron run's files without Megatron: weights of Hugging Face's form, cut as its ranks do.

Written head by head and rank by rank, as the oracle of what `dsx export` makes of them again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsx.checkpoint.files import FORMAT
from dsx.checkpoint.tags import Manifest, begin_tag, complete_tag
from dsx.comm.topology import RankInfo
from dsx.config.schema import preset
from dsx.engines.megatron_model.notes import NOTES, ModelNotes
from dsx.engines.simulated import SimulatedClusters
from tests.checkpoint.saved import save_state


@dataclass(frozen=True)
class Shape:
    """A tiny model's sizes; `rows` of the vocabulary are trained, `vocab` of them used."""

    layers: int = 2
    hidden: int = 8
    heads: int = 4
    groups: int = 2
    head: int = 4
    ffn: int = 6
    vocab: int = 10
    rows: int = 12
    length: int = 5
    ranks: int = 2


GPT2 = Shape(groups=4, head=2)
LLAMA = Shape()
FREQUENCIES = [10000.0 ** (-i / 2) for i in range(2)]


def notes_of(shape: Shape, is_llama: bool, **changes: Any) -> ModelNotes:
    """Return what such a run notes; `changes` to its TransformerConfig."""
    transformer = {
        "num_layers": shape.layers, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads, "num_query_groups": shape.groups,
        "kv_channels": shape.head, "layernorm_epsilon": 1e-6, "hidden_dropout": 0.1,
        "attention_dropout": 0.2, "init_method_std": 0.02, "qk_layernorm": False,
        "normalization": "RMSNorm" if is_llama else "LayerNorm", "add_qkv_bias": False,
        "add_bias_linear": not is_llama, "gated_linear_unit": is_llama, "window_size": None,
    }  # fmt: skip
    rotary = {"base": 10000, "percent": 1.0, "is_scaled": False, "interpolation": None}
    cuts: dict[str, tuple[int, int]] = {
        "embedding.word_embeddings.weight": (0, 1), "output_layer.weight": (0, 1),
    }  # fmt: skip
    for layer in range(shape.layers):
        name = f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            cuts[f"{name}self_attention.linear_qkv.{kind}"] = (0, 1)
            cuts[f"{name}mlp.linear_fc1.{kind}"] = (0, 2 if is_llama else 1)
        cuts[f"{name}self_attention.linear_proj.weight"] = (1, 1)
        cuts[f"{name}mlp.linear_fc2.weight"] = (1, 1)
    return ModelNotes(
        "GPTModel",
        {**transformer, **changes},
        "silu" if is_llama else "gelu",
        "rope" if is_llama else "learned_absolute",
        shape.length,
        shape.rows,
        shape.vocab,
        False,
        rotary,
        FREQUENCIES if is_llama else [],
        cuts,
    )


def random_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def llama_weights(
    shape: Shape, has_bias: bool = False, has_norms: bool = False
) -> dict[str, Tensor]:
    """Return random weights under the names of Hugging Face's Llama, Qwen2 or Qwen3."""
    table = (shape.vocab, shape.hidden)
    rows = {"q": shape.heads * shape.head, "k": shape.groups * shape.head}
    rows["v"] = rows["k"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        for letter, count in rows.items():
            found[f"{name}self_attn.{letter}_proj.weight"] = (count, shape.hidden)
            if has_bias:
                found[f"{name}self_attn.{letter}_proj.bias"] = (count,)
            if has_norms and letter != "v":
                found[f"{name}self_attn.{letter}_norm.weight"] = (shape.head,)
        found[f"{name}self_attn.o_proj.weight"] = (shape.hidden, rows["q"])
        found[f"{name}input_layernorm.weight"] = (shape.hidden,)
        found[f"{name}post_attention_layernorm.weight"] = (shape.hidden,)
        found[f"{name}mlp.gate_proj.weight"] = (shape.ffn, shape.hidden)
        found[f"{name}mlp.up_proj.weight"] = (shape.ffn, shape.hidden)
        found[f"{name}mlp.down_proj.weight"] = (shape.hidden, shape.ffn)
    found |= {"model.norm.weight": (shape.hidden,), "lm_head.weight": table}
    return random_of(found)


def gpt2_weights(shape: Shape) -> dict[str, Tensor]:
    """Return random weights under the names of Hugging Face's GPT-2."""
    hidden, ffn = shape.hidden, shape.ffn
    found: dict[str, tuple[int, ...]] = {
        "wte.weight": (shape.vocab, hidden), "wpe.weight": (shape.length, hidden),
        "ln_f.weight": (hidden,), "ln_f.bias": (hidden,),
    }  # fmt: skip
    for layer in range(shape.layers):
        sizes = {
            "attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, ffn), "mlp.c_proj": (ffn, hidden),
        }  # fmt: skip
        for name, size in sizes.items():
            found[f"h.{layer}.{name}.weight"] = size
            found[f"h.{layer}.{name}.bias"] = (size[1],)
        for name in ("ln_1", "ln_2"):
            found[f"h.{layer}.{name}.weight"] = found[f"h.{layer}.{name}.bias"] = (hidden,)
    whole = {f"transformer.{name}": size for name, size in found.items()}
    return random_of({**whole, "lm_head.weight": (shape.vocab, hidden)})


def qkv_of_rank(shape: Shape, rank: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the rows of a rank: of each of its groups the queries, the key, the value."""
    of_group, rows = shape.heads // shape.groups, []
    for group in range(shape.groups):
        if group * shape.ranks // shape.groups != rank:
            continue
        for head in range(group * of_group, (group + 1) * of_group):
            rows.append(query[head * shape.head : (head + 1) * shape.head])
        for one in (key, value):
            rows.append(one[group * shape.head : (group + 1) * shape.head])
    return torch.cat(rows)


def part(shape: Shape, rank: int, whole: Tensor, dimension: int = 0) -> Tensor:
    size = whole.shape[dimension] // shape.ranks
    return whole.narrow(dimension, rank * size, size)


def padded(shape: Shape, table: Tensor) -> Tensor:
    return torch.cat([table, torch.full((shape.rows - shape.vocab, shape.hidden), 7.0)])


def cut_llama(shape: Shape, w: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the ranks of a Megatron run hold together, by the names in its files."""
    found = {"decoder.final_layernorm.weight": w["model.norm.weight"]}
    for rank in range(shape.ranks):
        for ours, theirs in (
            ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            ("output_layer.weight", "lm_head.weight"),
        ):
            found[f"{ours}.slice_{rank}"] = part(shape, rank, padded(shape, w[theirs]))
        for layer in range(shape.layers):
            ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            for kind in ("weight", "bias"):
                three = [w.get(f"{theirs}self_attn.{letter}_proj.{kind}") for letter in "qkv"]
                if three[0] is not None:
                    name = f"{ours}self_attention.linear_qkv.{kind}.slice_{rank}"
                    found[name] = qkv_of_rank(shape, rank, *three)  # type: ignore[arg-type]
            gate, up = (w[f"{theirs}mlp.{one}_proj.weight"] for one in ("gate", "up"))
            both = torch.cat([part(shape, rank, gate), part(shape, rank, up)])
            found[f"{ours}mlp.linear_fc1.weight.slice_{rank}"] = both
            for mine, other in (
                ("self_attention.linear_proj", "self_attn.o_proj"),
                ("mlp.linear_fc2", "mlp.down_proj"),
            ):
                whole = w[f"{theirs}{other}.weight"]
                found[f"{ours}{mine}.weight.slice_{rank}"] = part(shape, rank, whole, 1)
            names = {
                "input_layernorm": "input_layernorm",
                "pre_mlp_layernorm": "post_attention_layernorm",
                "self_attention.q_layernorm": "self_attn.q_norm",
                "self_attention.k_layernorm": "self_attn.k_norm",
            }
            for mine, other in names.items():
                if f"{theirs}{other}.weight" in w:
                    found[f"{ours}{mine}.weight"] = w[f"{theirs}{other}.weight"]
    return found


def cut_gpt2(shape: Shape, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the ranks of a Megatron run hold together, by the names in its files."""
    w = {name.removeprefix("transformer."): tensor for name, tensor in given.items()}
    found = {
        "embedding.position_embeddings.weight": w["wpe.weight"],
        "decoder.final_layernorm.weight": w["ln_f.weight"],
        "decoder.final_layernorm.bias": w["ln_f.bias"],
    }
    for rank in range(shape.ranks):
        for ours, theirs in (("embedding.word_embeddings", "wte"), ("output_layer", "lm_head")):
            table = padded(shape, w[f"{theirs}.weight"])
            found[f"{ours}.weight.slice_{rank}"] = part(shape, rank, table)
        for layer in range(shape.layers):
            ours, theirs = f"decoder.layers.{layer}.", f"h.{layer}."
            for kind in ("weight", "bias"):
                three = w[f"{theirs}attn.c_attn.{kind}"].t().split(shape.hidden)
                name = f"{ours}self_attention.linear_qkv.{kind}.slice_{rank}"
                found[name] = qkv_of_rank(shape, rank, *three)
                fc1 = w[f"{theirs}mlp.c_fc.{kind}"].t()
                found[f"{ours}mlp.linear_fc1.{kind}.slice_{rank}"] = part(shape, rank, fc1)
                for mine, other in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
                    found[f"{ours}{mine}.{kind}"] = w[f"{theirs}{other}.{kind}"]
            for mine, other in (
                ("self_attention.linear_proj", "attn.c_proj"), ("mlp.linear_fc2", "mlp.c_proj"),
            ):  # fmt: skip
                whole = w[f"{theirs}{other}.weight"].t()
                found[f"{ours}{mine}.weight.slice_{rank}"] = part(shape, rank, whole, 1)
                found[f"{ours}{mine}.bias"] = w[f"{theirs}{other}.bias"]
    return found


def module_of(weights: dict[str, Tensor]) -> nn.Module:
    """Return a module whose parameters have these names."""
    root = nn.Module()
    for name, tensor in weights.items():
        *path, last = name.split(".")
        inner = root
        for step in path:
            if step not in dict(inner.named_children()):
                inner.add_module(step, nn.Module())
            inner = inner.get_submodule(step)
        inner.register_parameter(last, nn.Parameter(tensor.contiguous().clone()))
    return root


def save_run(base: Path, weights: dict[str, Tensor], notes: ModelNotes | str | None) -> Path:
    """Save what two clusters hold whose mean are these weights; return the checkpoints' directory.

    Those of cluster 0 have become a quarter smaller, those of cluster 1 a quarter larger.
    """
    models = [module_of(weights) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.25) for m in models]
    run = SimulatedClusters(
        models, optimizers, preset("streaming_diloco", 2, schedule={"interval": 4})
    )

    def away(model: Any, cluster: int, step: int) -> Tensor:
        return sum((1 - 2 * cluster) * p.sum() for p in model.parameters())  # type: ignore[return-value]

    run.train_step(away)
    for m, loop in enumerate(run.loops):
        directory = base / f"cluster_{m}"
        unfinished = directory / begin_tag(directory, "iter_0000001")
        save_state(loop, unfinished, RankInfo(m, 2, 0, 1), "run", {}, {})
        if notes is not None:
            text = notes if isinstance(notes, str) else notes.as_json()
            (unfinished / NOTES).write_text(text)
        complete_tag(directory, "iter_0000001", Manifest(FORMAT, 1, "run", 2, 1))
    return base


def with_notes(notes: ModelNotes, **changes: Any) -> ModelNotes:
    return replace(copy.deepcopy(notes), **changes)
