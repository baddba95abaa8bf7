"""The layers of Mixtral, Qwen2-MoE and Qwen3-MoE: a router, experts, and a shared one with a gate.

Megatron's router takes the softmax of the logits that it has chosen, which is what Hugging Face
does where it makes the chosen ones' shares add up to one; with --moe-router-pre-softmax they are
left as they were among all, which a Qwen calls norm_topk_prob false. A Qwen may have layers without
experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsx.engines.megatron_model.experts import KINDS, names_of
from dsx.engines.megatron_model.notes import ModelNotes
from dsx.engines.megatron_model.parts import Match, gated

_MIXTRAL = ("w1", "w3", "w2")
_QWEN = ("gate_proj", "up_proj", "down_proj")


def dense_layers(notes: ModelNotes) -> list[int]:
    """Return the layers without experts, from 0."""
    given: Any = notes.transformer
    count: int = given["num_layers"]
    if given.get("num_moe_experts") is None:
        return list(range(count))
    frequency = given.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [layer for layer in range(count) if layer % frequency]
    return [layer for layer, has_experts in enumerate(frequency) if not has_experts]


def mixture_config(notes: ModelNotes, kind: str) -> dict[str, Any]:
    """Return what config.json says of experts in a model of type `kind`, nothing of a dense one."""
    given: Any = notes.transformer
    if given.get("num_moe_experts") is None:
        return {}
    coefficient = given.get("moe_aux_loss_coeff")
    has_loss = given.get("moe_router_load_balancing_type") == "aux_loss"
    found: dict[str, Any] = {
        "num_experts_per_tok": given["moe_router_topk"],
        "router_aux_loss_coef": coefficient if has_loss else 0.0,
        "output_router_logits": False,
        "sliding_window": None,
    }
    if kind == "mixtral":
        found["num_local_experts"] = given["num_moe_experts"]
        found["intermediate_size"] = given["moe_ffn_hidden_size"]
        found["router_jitter_noise"] = given.get("moe_input_jitter_eps") or 0.0
        return found
    found["num_experts"] = given["num_moe_experts"]
    found["moe_intermediate_size"] = given["moe_ffn_hidden_size"]
    found["norm_topk_prob"] = not given.get("moe_router_pre_softmax")
    found["decoder_sparse_step"] = 1
    found["mlp_only_layers"] = dense_layers(notes)
    found["use_sliding_window"] = False
    if kind == "qwen2_moe":
        found["shared_expert_intermediate_size"] = given["moe_shared_expert_intermediate_size"]
        found["qkv_bias"] = True
    return found


def mlp(theirs: str, ours: str, ffn: int, hidden: int) -> Iterator[Match]:
    """Yield the two matrices of a SwiGLU MLP, by the names of all but Mixtral."""
    gate, up, down = (f"{ours}{name}.weight" for name in _QWEN)
    yield gated(f"{theirs}linear_fc1.weight", gate, up, ffn, hidden)
    yield Match(f"{theirs}linear_fc2.weight", {down: (hidden, ffn)})


def mixture(notes: ModelNotes, kind: str, layer: str, ours: str) -> Iterator[Match]:
    """Yield what a layer has in the place of an MLP."""
    given: Any = notes.transformer
    count, hidden = given["num_moe_experts"], given["hidden_size"]
    inner = f"{ours}block_sparse_moe." if kind == "mixtral" else f"{ours}mlp."
    yield Match(f"{layer}mlp.router.weight", {f"{inner}gate.weight": (count, hidden)})
    yield from _experts(notes, f"{layer}mlp.experts.", f"{inner}experts.", kind == "mixtral")
    if kind == "qwen2_moe":
        shared = f"{layer}mlp.shared_experts."
        ffn = given["moe_shared_expert_intermediate_size"]
        yield from mlp(shared, f"{inner}shared_expert.", ffn, hidden)
        gate = {f"{inner}shared_expert_gate.weight": (1, hidden)}
        yield Match(f"{shared}gate_weight", gate)


def _experts(notes: ModelNotes, prefix: str, ours: str, is_mixtral: bool) -> Iterator[Match]:
    given: Any = notes.transformer
    count, hidden, ffn = (
        given[name] for name in ("num_moe_experts", "hidden_size", "moe_ffn_hidden_size")
    )
    gate, up, down = _MIXTRAL if is_mixtral else _QWEN
    kind = notes.experts.kinds[0] if notes.experts else KINDS[0]
    first, second = (
        list(names_of(kind, prefix, linear, count)) for linear in ("linear_fc1", "linear_fc2")
    )
    numbers = [f"{ours}{number}." for number in range(count)]
    if len(first) < count:  # one matrix holds all
        both = {f"{n}{one}.weight": (ffn, hidden) for n in numbers for one in (gate, up)}
        yield _stack(first[0], both, (count, hidden, 2 * ffn), 2)
        last = {f"{n}{down}.weight": (hidden, ffn) for n in numbers}
        yield _stack(second[0], last, (count, ffn, hidden), 1)
        return
    for number, fc1, fc2 in zip(numbers, first, second, strict=True):
        yield gated(fc1, f"{number}{gate}.weight", f"{number}{up}.weight", ffn, hidden)
        yield Match(fc2, {f"{number}{down}.weight": (hidden, ffn)})


def _stack(
    source: str, targets: dict[str, tuple[int, ...]], shape: tuple[int, int, int], runs: int
) -> Match:
    """Return a GroupedMLP's matrix of all experts, [experts, in, out], of `runs` weights each."""

    def split(whole: Tensor) -> list[Tensor]:
        return [part for one in whole.view(shape) for part in one.t().chunk(runs)]

    def join(parts: Sequence[Tensor]) -> Tensor:
        both = (torch.cat(list(parts[i : i + runs])).t() for i in range(0, len(parts), runs))
        stack = torch.stack(list(both))
        is_first = runs == 2
        return stack.reshape((shape[1], -1) if is_first else (-1, shape[2]))

    return Match(source, targets, split, join)
