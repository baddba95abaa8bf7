"""Experts as the ranks of a Megatron run hold them, of each class, cut expert by expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsx.engines.megatron_model.notes import ExpertNotes, ModelNotes
from tests.engines.megatron_families import EXPERT_FFN, SHARED_FFN
from tests.engines.megatron_saved import (
    Shape,
    cut_llama,
    llama_weights,
    notes_of,
    random_of,
    with_notes,
)

EXPERTS, TOP, FFN, SHARED = 4, 2, EXPERT_FFN, SHARED_FFN
NAMES = {"mixtral": ("w1", "w3", "w2")}
PLAIN = ("gate_proj", "up_proj", "down_proj")


def inner(kind: str) -> str:
    return "block_sparse_moe." if kind == "mixtral" else "mlp."


def mixture_weights(shape: Shape, kind: str, dense: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Return random weights under the names of Hugging Face's files."""
    found = llama_weights(shape, kind == "qwen2_moe", kind == "qwen3_moe")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in set(range(shape.layers)) - set(dense):
        name = f"model.layers.{layer}."
        for one in PLAIN:
            del found[f"{name}mlp.{one}.weight"]
        name += inner(kind)
        shapes[f"{name}gate.weight"] = (EXPERTS, shape.hidden)
        for number in range(EXPERTS):
            for one in NAMES.get(kind, PLAIN):
                is_down = one in ("down_proj", "w2")
                size = (shape.hidden, FFN) if is_down else (FFN, shape.hidden)
                shapes[f"{name}experts.{number}.{one}.weight"] = size
        if kind == "qwen2_moe":
            for one in PLAIN:
                size = (shape.hidden, SHARED) if one == "down_proj" else (SHARED, shape.hidden)
                shapes[f"{name}shared_expert.{one}.weight"] = size
            shapes[f"{name}shared_expert_gate.weight"] = (1, shape.hidden)
    return found | random_of(shapes)


def mixture_notes(
    shape: Shape, kind: str, layout: str, ranks: int, slices: int, dense: tuple[int, ...] = ()
) -> ModelNotes:
    """Return what such a run notes."""
    own = EXPERTS // ranks
    notes = notes_of(
        shape, True,
        add_qkv_bias=kind == "qwen2_moe", qk_layernorm=kind == "qwen3_moe",
        num_moe_experts=EXPERTS, moe_router_topk=TOP, moe_ffn_hidden_size=FFN,
        moe_layer_freq=[int(layer not in dense) for layer in range(shape.layers)] if dense else 1,
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01,
        moe_router_pre_softmax=kind == "qwen2_moe",
        moe_shared_expert_intermediate_size=SHARED if kind == "qwen2_moe" else None,
        moe_shared_expert_gate=kind == "qwen2_moe",
    )  # fmt: skip
    cuts = dict(notes.cuts)
    for layer in set(range(shape.layers)) - set(dense):
        name = f"decoder.layers.{layer}.mlp."
        cuts[f"{name}shared_experts.linear_fc1.weight"] = (0, 2)
        cuts[f"{name}shared_experts.linear_fc2.weight"] = (1, 1)
        name += "experts."
        for i in range(own):
            for linear, cut in (("linear_fc1", (0, 2)), ("linear_fc2", (1, 1))):
                cuts[f"{name}local_experts.{i}.{linear}.weight"] = cut
                cuts[f"{name}{linear}.weight{i}"] = cut
        cuts[f"{name}weight1"], cuts[f"{name}weight2"] = (2, 2), (1, 1)
    held = [list(range(rank * own, (rank + 1) * own)) for rank in range(ranks)]
    return with_notes(notes, cuts=cuts, experts=ExpertNotes([layout], held))


def cut_mixture(
    shape: Shape,
    w: dict[str, Tensor],
    kind: str,
    layout: str,
    ranks: int,
    slices: int,
    dense: tuple[int, ...] = (),
) -> dict[str, Tensor]:
    """Return what the ranks hold together; dense weights are cut by `shape.ranks`."""
    found = cut_llama(shape, {**llama_weights(shape), **w})
    for layer in set(range(shape.layers)) - set(dense):
        ours, theirs = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.{inner(kind)}"
        found = {n: t for n, t in found.items() if not n.startswith(f"{ours}linear_fc")}
        found[f"{ours}router.weight"] = w[f"{theirs}gate.weight"]
        if kind == "qwen2_moe":
            found[f"{ours}shared_experts.gate_weight"] = w[f"{theirs}shared_expert_gate.weight"]
            three = [w[f"{theirs}shared_expert.{one}.weight"] for one in PLAIN]
            for rank in range(shape.ranks):
                for name, cut in two(three, rank, shape.ranks):
                    found[f"{ours}shared_experts.{name}.weight.slice_{rank}"] = cut
        for rank in range(ranks):
            for slice in range(slices):
                suffix = f".experts_{rank}" * (ranks > 1) + f".slice_{slice}" * (slices > 1)
                own: dict[str, list[Tensor]] = {"linear_fc1": [], "linear_fc2": []}
                for number in range(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks):
                    names = NAMES.get(kind, PLAIN)
                    three = [w[f"{theirs}experts.{number}.{one}.weight"] for one in names]
                    for name, cut in two(three, slice, slices):
                        own[name].append(cut)
                for name, tensor in held_as(layout, own):
                    found[f"{ours}experts.{name}{suffix}"] = tensor
    return found


def two(three: list[Tensor], rank: int, ranks: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's two matrices of gate, up and down projection."""
    gate, up, down = three
    rows = len(gate) // ranks
    mine = slice(rank * rows, (rank + 1) * rows)
    yield "linear_fc1", torch.cat([gate[mine], up[mine]])
    yield "linear_fc2", down[:, mine]


def held_as(layout: str, own: dict[str, list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's parameters as a class of experts has them."""
    for linear, matrices in own.items():
        if layout == "GroupedMLP":
            stack: Any = torch.stack([matrix.t() for matrix in matrices])
            is_first = linear == "linear_fc1"
            shape = (stack.shape[1], -1) if is_first else (-1, stack.shape[2])
            yield f"weight{linear[-1]}", stack.reshape(shape)
            continue
        for i, matrix in enumerate(matrices):
            sequential = f"local_experts.{i}.{linear}.weight"
            yield (sequential if layout == "SequentialMLP" else f"{linear}.weight{i}"), matrix
