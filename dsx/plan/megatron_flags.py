"""A model's sizes and pipeline, out of Megatron's flags; what no formula tells is refused.

Flags that change neither a rank's parameters nor what is kept of them are passed over.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from dsx.plan.gpt_shapes import GPT, Experts
from dsx.plan.pipeline_split import PipelineSplit
from dsx.plan.published.scenario import MAX_LAYERS, require_number

MOST = 10**9  # of any size
_SIZES = (
    "num-layers", "hidden-size", "num-attention-heads", "seq-length", "vocab-size",
    "ffn-hidden-size", "num-query-groups", "max-position-embeddings", "global-batch-size",
    "kv-channels", "num-experts", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size",
    "expert-tensor-parallel-size", "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank", "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
)  # fmt: skip
_SIZES_OF_ONE = (
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "expert-model-parallel-size", "micro-batch-size",
)  # fmt: skip
_SWITCHES = (
    "swiglu", "bf16", "use-distributed-optimizer", "sequence-parallel", "add-qkv-bias",
    "disable-bias-linear", "untie-embeddings-and-output-weights", "group-query-attention",
    "enable-cuda-graph", "external-cuda-graph", "qk-layernorm", "moe-shared-expert-gate",
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
    "quick-geglu", "use-rotary-position-embeddings", "no-position-embedding",
)  # fmt: skip
_WORDS = {  # with Megatron's defaults
    "moe-layer-freq": "1", "position-embedding-type": "learned_absolute",
    "normalization": "LayerNorm", "cuda-graph-impl": "none",
}  # fmt: skip
_NUMBERS = {"make-vocab-size-divisible-by": 128, "moe-router-topk": 2}
_UNKNOWN_VALUES: dict[str, tuple[str, ...]] = {  # with those that change nothing
    "mtp-num-layers": (), "moe-latent-size": (), "pipeline-model-parallel-layout": (),
    "optimizer": ("adam",), "num-distributed-optimizer-instances": ("1",),
    "softmax-type": ("vanilla", "off-by-one"), "experimental-attention-variant": (),
    "linear-attention-freq": (), "heterogeneous-layers-config-path": (),
    "heterogeneous-layers-config-encoded-json": (), "hybrid-override-pattern": (),
    "hybrid-layer-pattern": (), "padded-vocab-size": (), "spec": (), "yaml-cfg": (),
    "tensor-parallel-num-weight-shards": (), "expert-tensor-parallel-num-weight-shards": (),
}  # fmt: skip
_UNKNOWN = (
    "fp16", "multi-latent-attention", "optimizer-cpu-offload", "use-precision-aware-optimizer",
    "moe-use-legacy-grouped-gemm", "moe-router-enable-expert-bias", "attention-output-gate",
    "use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2", "fp8-param-gather",
    "fp4-param-gather", "grad-reduce-in-bf16", "qk-l2-norm", "is-hybrid-model", "moe-extended-tp",
    "retro-add-retriever", "freeze-all-layers",
)  # fmt: skip


def parse(text: Sequence[str], is_whole: bool = True) -> argparse.Namespace:
    """Read the sizes among Megatron's flags, with Megatron's defaults.

    `is_whole`: they tell how a cluster is cut, too, and not only the sizes of a model that
    DeepSpeed trains. ValueError for a missing or senseless one, and for flags whose effect no
    formula here tells.
    """
    _require_whole_names(text)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=int)
    for name in _SIZES_OF_ONE:
        parser.add_argument(f"--{name}", type=int, default=1)
    for name, number in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, word in _WORDS.items():
        parser.add_argument(f"--{name}", default=word)
    for name in _UNKNOWN_VALUES:
        parser.add_argument(f"--{name}")
    for name in (*_SWITCHES, *_UNKNOWN):
        parser.add_argument(f"--{name}", action="store_true")
    try:
        known = parser.parse_known_args(list(text))[0]
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    _require_told(known)
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    missing = [f"--{n.replace('_', '-')}" for n in needed if getattr(known, n) is None]
    if missing:
        raise ValueError(f"the flags lack {', '.join(missing)}")
    for name, value in vars(known).items():
        if isinstance(value, int) and not isinstance(value, bool):
            most = MAX_LAYERS if name == "num_layers" else MOST
            require_number(f"--{name.replace('_', '-')}", value, 1, most)
    _require_whole_heads(known)
    _require_whole_experts(known, is_whole)
    return known


def model_of(known: argparse.Namespace) -> GPT:
    """Return the model's sizes, the vocabulary padded as Megatron pads it.

    ValueError for positions that Megatron refuses.
    """
    multiple = known.make_vocab_size_divisible_by * known.tensor_model_parallel_size
    groups = known.num_query_groups if known.group_query_attention else None
    return GPT(
        layers=known.num_layers,
        hidden=known.hidden_size,
        ffn=_ffn(known),
        heads=known.num_attention_heads,
        groups=groups or known.num_attention_heads,
        vocabulary=-(-known.vocab_size // multiple) * multiple,
        positions=_learned_positions(known),
        is_gated=known.swiglu or known.quick_geglu,
        has_bias=not known.disable_bias_linear,
        has_qkv_bias=known.add_qkv_bias,
        is_rms_norm=known.normalization == "RMSNorm",
        is_tied=not known.untie_embeddings_and_output_weights,
        channels=known.kv_channels,
        has_qk_norm=known.qk_layernorm,
        experts=_experts(known),
    )


def split_of(known: argparse.Namespace) -> PipelineSplit:
    """Return how layers go to pipeline stages; ValueError for what Megatron refuses."""
    first, last = known.decoder_first_pipeline_num_layers, known.decoder_last_pipeline_num_layers
    by_stage, in_chunk = (
        known.num_virtual_stages_per_pipeline_rank,
        known.num_layers_per_virtual_pipeline_stage,
    )
    counts_embedding = known.account_for_embedding_in_pipeline_split
    counts_loss = known.account_for_loss_in_pipeline_split
    chunks = by_stage or 1
    if in_chunk and not by_stage:
        if first or last:
            raise ValueError(
                "--num-layers-per-virtual-pipeline-stage is of equal pipeline stages; with uneven "
                "ones write --num-virtual-stages-per-pipeline-rank"
            )
        counted = known.num_layers + counts_embedding + counts_loss
        pieces = known.pipeline_model_parallel_size * in_chunk
        if counted % pieces:
            raise ValueError(
                f"{counted} layers do not divide into virtual stages of "
                f"--num-layers-per-virtual-pipeline-stage {in_chunk} on "
                f"{known.pipeline_model_parallel_size} pipeline ranks"
            )
        chunks = counted // pieces
    return PipelineSplit(chunks, first, last, counts_embedding, counts_loss)


def _ffn(known: argparse.Namespace) -> int:
    """Return the MLP's width; Megatron's default of SwiGLU is two thirds, down to a 64th."""
    if known.ffn_hidden_size:
        return known.ffn_hidden_size
    if known.swiglu:
        return int((4 * known.hidden_size * 2 / 3) / 64) * 64
    return 4 * known.hidden_size


def _learned_positions(known: argparse.Namespace) -> int | None:
    kind = "rope" if known.use_rotary_position_embeddings else known.position_embedding_type
    if known.no_position_embedding and kind != "rope":
        raise ValueError(
            f"--no-position-embedding with --position-embedding-type {kind}, which Megatron "
            "refuses; write --position-embedding-type rope"
        )
    is_learned = kind == "learned_absolute"
    return (known.max_position_embeddings or known.seq_length) if is_learned else None


def _require_whole_names(text: Sequence[str]) -> None:
    """Raise ValueError for an abbreviation, which Megatron would take and this parser pass over."""
    of_values = (*_SIZES, *_SIZES_OF_ONE, *_NUMBERS, *_WORDS, *_UNKNOWN_VALUES)
    names = [f"--{name}" for name in (*of_values, *_SWITCHES, *_UNKNOWN)]
    for word in text:
        short = word.split("=")[0]
        if len(short) < 3 or not short.startswith("--") or short in names:
            continue
        whole = [name for name in names if name.startswith(short)]
        if whole:
            raise ValueError(f"{short} is short for {' or '.join(whole)}; write the name in full")


def _require_told(known: argparse.Namespace) -> None:
    """Raise ValueError for flags with which a rank holds what no formula here tells."""
    told = vars(known)
    given = {name: told[name.replace("-", "_")] for name in _UNKNOWN_VALUES}
    flags = [
        f"--{name} {value}"
        for name, value in given.items()
        if value is not None and value not in _UNKNOWN_VALUES[name]
    ]
    flags += [f"--{name}" for name in _UNKNOWN if told[name.replace("-", "_")]]
    if flags:
        raise ValueError(
            f"{', '.join(flags)}: dsx memory plans GPTs of attention and MLPs or experts, in fp32 "
            "or bf16, with gradients in fp32 and Adam's states on the accelerator, whole or "
            "sharded over all data-parallel ranks; leave the flags out to plan such a model"
        )


def _require_whole_heads(known: argparse.Namespace) -> None:
    hidden, heads = known.hidden_size, known.num_attention_heads
    if hidden % heads and known.kv_channels is None:
        raise ValueError(
            f"--hidden-size={hidden} must be a multiple of --num-attention-heads={heads}; try "
            f"{-(-hidden // heads) * heads}"
        )


def _require_whole_experts(known: argparse.Namespace, is_megatron: bool) -> None:
    """Raise ValueError for experts that Megatron, or dsx with it, does not cut so."""
    count, parallel = known.num_experts, known.expert_model_parallel_size
    if count is None:
        if parallel > 1:
            raise ValueError(
                f"--expert-model-parallel-size={parallel} without --num-experts: there is nothing "
                "to divide; leave it out, or give the number of experts"
            )
        return
    if is_megatron and not known.disable_bias_linear:
        raise ValueError(
            f"--num-experts={count}: dsx memory plans experts without biases; add "
            "--disable-bias-linear"
        )
    if count % parallel:
        raise ValueError(
            f"--num-experts={count} do not divide over --expert-model-parallel-size={parallel}; "
            "use a number of ranks that divides them"
        )
    if known.moe_router_topk > count:
        raise ValueError(
            f"--moe-router-topk={known.moe_router_topk} exceeds --num-experts={count}; try {count}"
        )
    own, tensor = known.expert_tensor_parallel_size, known.tensor_model_parallel_size
    if own not in (None, tensor) and parallel == 1:
        raise ValueError(
            f"--expert-tensor-parallel-size={own} where every rank holds all experts: use "
            f"{tensor}, as for dense layers, or --expert-model-parallel-size above 1"
        )


def _experts(known: argparse.Namespace) -> Experts | None:
    if known.num_experts is None:
        return None
    return Experts(
        known.num_experts,
        known.moe_ffn_hidden_size or _ffn(known),
        known.moe_router_topk,
        _with_experts(known.moe_layer_freq, known.num_layers),
        known.moe_shared_expert_intermediate_size,
        known.moe_shared_expert_gate,
    )


def _with_experts(frequency: str, num_layers: int) -> tuple[bool, ...]:
    """Read --moe-layer-freq: one layer in so many, from the first on, or a list as `[0]+[1]*3`."""
    text = frequency.strip().strip("'\"")
    if text.isdecimal() and int(text) > 0:
        return tuple(layer % int(text) == 0 for layer in range(num_layers))
    found: list[int] = []
    rest = text.replace(" ", "")
    while rest.startswith("(") and rest.endswith(")"):
        rest = rest[1:-1]
    for term in rest.split("+"):
        match = re.fullmatch(r"\(?\[([01](?:,[01])*)\](?:\*(\d{1,5}))?\)?", term)
        if match is None:
            raise ValueError(
                f"--moe-layer-freq {frequency!r} is neither a whole number nor a list of a 0 or 1 "
                "for each layer; write it as [0]*1+[1]*3"
            )
        found += [int(word) for word in match[1].split(",")] * int(match[2] or 1)
    if len(found) != num_layers:
        raise ValueError(
            f"--moe-layer-freq {frequency!r} is of {len(found)} layers, not of "
            f"--num-layers={num_layers}"
        )
    return tuple(map(bool, found))
