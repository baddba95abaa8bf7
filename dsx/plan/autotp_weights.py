"""The weights of a GPT that AutoTP cuts: names and shapes of a Hugging Face decoder.

Queries, keys and values, and both matrices into a gated MLP, are each their own there. What is cut
by columns is cut with its bias, what is cut by rows without. AutoTP gives a tensor-parallel rank
whole heads of keys and values, and equal parts of an MLP's width; slices of several sizes are not
served (engines/deepspeed/layout.py), and are refused here.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsx.plan.autotp_rules import Slices
from dsx.plan.gpt_shapes import GPT, Weight

EMBEDDING, POSITIONS, HEAD = "model.embed_tokens", "model.embed_positions", "lm_head"


def sliced_weights(model: GPT, slices: Slices) -> list[Weight]:
    """Return all of a model, in its order, tensors whole; ValueError for what is not cut so."""
    if model.is_tied and slices.is_by_class:
        raise ValueError(
            f"tensor_parallel.autotp_size={slices.ranks} without preset_model or partition_config, "
            "of a model whose head is its embedding: whether both are cut then depends on the "
            'release of transformers; write "preset_model": "llama", which leaves them whole, or '
            "--untie-embeddings-and-output-weights"
        )
    found: list[Weight] = []
    splits: dict[str, int | None] = {}
    for weight in _weights(model):
        module, _, kind = weight.name.rpartition(".")
        if kind == "weight":
            splits[module] = _split_of(weight, model, slices)
        split = splits[module]
        found.append(Weight(weight.name, weight.shape, None if kind == "bias" and split else split))
    if not any(split is not None for split in splits.values()):
        raise ValueError(
            f"tensor_parallel.autotp_size={slices.ranks}: no pattern of partition_config matches a "
            "weight of what is planned, whose names are those of a Hugging Face decoder "
            "(model.layers.0.self_attn.q_proj.weight, ...mlp.down_proj.weight); write patterns of "
            'them, or "preset_model": "llama"'
        )
    if model.is_tied:  # the head is a layer of its own to AutoTP
        _split_of(Weight(f"{HEAD}.weight", (model.vocabulary, model.hidden)), model, slices)
    return found


def _split_of(weight: Weight, model: GPT, slices: Slices) -> int | None:
    """Return the dimension of a weight that is cut; ValueError where a run would be refused."""
    name, ranks = weight.name, slices.ranks
    if len(weight.shape) < 2:
        return None
    is_embedding = name.startswith((EMBEDDING, POSITIONS))
    rule = slices.rule_of(name)
    if rule is None:
        if slices.is_strict and not is_embedding:
            raise ValueError(f"tensor_parallel.partition_config.strict_mode: no pattern for {name}")
        return None
    if rule.split is None:
        return None
    is_tied_head = model.is_tied and name.startswith(HEAD)
    if is_tied_head and rule.is_gathered and rule.split == 0:
        return None  # DeepSpeed leaves it whole
    if is_embedding or is_tied_head:
        raise ValueError(
            f"{rule.pattern!r} of tensor_parallel.partition_config cuts {name}: dsx serves no "
            "embedding in slices, which AutoTP does not mark as such; give it partition_type skip"
        )
    count, what = _units(weight, rule.split, model)
    if count % ranks:
        raise ValueError(
            f"tensor_parallel.autotp_size={ranks} cuts {name} {weight.shape} into slices of "
            f"several sizes ({what}: {count}), of which ZeRO's shards do not match: choose sizes "
            "and heads that it divides"
        )
    return rule.split


def _units(weight: Weight, split: int, model: GPT) -> tuple[int, str]:
    """Return of what a rank gets a whole number."""
    size = weight.shape[split]
    if ".self_attn." in weight.name and size % model.groups == 0:
        return model.groups, "heads of keys and values"
    return size, "elements"


def _weights(model: GPT) -> Iterator[Weight]:
    hidden, channels = model.hidden, model.channels or model.hidden // model.heads
    attended, of_groups = model.heads * channels, model.groups * channels
    has_qkv_bias = model.has_bias or model.has_qkv_bias
    yield Weight(f"{EMBEDDING}.weight", (model.vocabulary, hidden))
    if model.positions is not None:
        yield Weight(f"{POSITIONS}.weight", (model.positions, hidden))
    into = ("gate_proj", "up_proj") if model.is_gated else ("up_proj",)
    for number in range(model.layers):
        layer = f"model.layers.{number}."
        attention = f"{layer}self_attn."
        yield from _linear(f"{attention}q_proj", (attended, hidden), has_qkv_bias)
        yield from _linear(f"{attention}k_proj", (of_groups, hidden), has_qkv_bias)
        yield from _linear(f"{attention}v_proj", (of_groups, hidden), has_qkv_bias)
        yield from _linear(f"{attention}o_proj", (hidden, attended), model.has_bias)
        if model.has_qk_norm:
            yield from _norm(f"{attention}q_norm", channels, model)
            yield from _norm(f"{attention}k_norm", channels, model)
        for name in into:
            yield from _linear(f"{layer}mlp.{name}", (model.ffn, hidden), model.has_bias)
        yield from _linear(f"{layer}mlp.down_proj", (hidden, model.ffn), model.has_bias)
        yield from _norm(f"{layer}input_layernorm", hidden, model)
        yield from _norm(f"{layer}post_attention_layernorm", hidden, model)
    yield from _norm("model.norm", hidden, model)
    if not model.is_tied:
        yield Weight(f"{HEAD}.weight", (model.vocabulary, hidden))


def _linear(name: str, shape: tuple[int, int], has_bias: bool) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", shape)
    if has_bias:
        yield Weight(f"{name}.bias", shape[:1])


def _norm(name: str, size: int, model: GPT) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (size,))
    if not model.is_rms_norm:
        yield Weight(f"{name}.bias", (size,))
