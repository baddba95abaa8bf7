"""A model and how one cluster is cut, out of Megatron's flags or a DeepSpeed JSON.

What plans start from: sizes, shapes, and what the inner engine takes of them. Shapes are formulas
(gpt_shapes.py), not those of a library's model on the meta device, which would need torch.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.config.files import ConfigError, read_json, read_text
from dsx.core.types import ParameterShape, Stage
from dsx.method.method import Method
from dsx.method.schedule.inside_backward import require_before, require_hooks
from dsx.plan import inner_memory
from dsx.plan.gpt_shapes import GPT
from dsx.plan.inner_memory import InnerMemory
from dsx.plan.published.scenario import MAX_LAYERS, require_number

MOST = 10**9  # of any size
_UNKNOWN_SIZES = ("num-experts", "kv-channels", "context-parallel-size", "mtp-num-layers")
_UNKNOWN = (
    *_UNKNOWN_SIZES, "fp16", "multi-latent-attention", "optimizer-cpu-offload",
    "use-precision-aware-optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """How one cluster is cut. `zero_stage` None: Megatron; `is_sharded`: its optimizer state is."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    is_bf16: bool = True
    is_sharded: bool = True
    zero_stage: int | None = None
    is_sequence_parallel: bool = False
    captured_by: str | None = None  # the flag by which Megatron makes a CUDA graph of the backward

    @property
    def engine(self) -> str:
        """The inner engine's name."""
        return "Megatron" if self.zero_stage is None else "DeepSpeed"

    @property
    def ranks(self) -> int:
        """Accelerators of one cluster."""
        return self.pipeline * self.tensor * self.data


@dataclass(frozen=True)
class Batch:
    """What activations depend on, and how many sequences a step of one cluster has, if given."""

    sequence: int
    micro_batch: int
    sequences_per_step: int | None = None


@dataclass(frozen=True)
class ModelFiles:
    """What the files say of the model and of one cluster."""

    model: GPT
    cluster: Cluster
    batch: Batch

    @property
    def micro_batches(self) -> int:
        """Of one step of a rank; 1 if they are not told."""
        together = self.batch.micro_batch * self.cluster.data
        return max(1, (self.batch.sequences_per_step or 1) // together)


def read_model(source: Path, model_flags: Path | None, ranks: int | None) -> ModelFiles:
    """Read a file of Megatron flags, or a DeepSpeed JSON beside one for the model.

    ValueError for what is missing or does not go together.
    """
    if source.suffix != ".json":
        if model_flags is not None:
            raise ValueError("--model goes with a DeepSpeed JSON; a file of flags tells the model")
        known = _parse(read_words(source))
        return ModelFiles(_model(known), _megatron(known, ranks), _batch(known))
    if model_flags is None or ranks is None:
        raise ValueError(
            f"{source} does not tell the model nor the ranks of a cluster: add --model FILE (with "
            "Megatron's flags for its sizes) and their number"
        )
    known = _parse(read_words(model_flags))
    document = read_json(source)
    micro_batch = _integer(document, "train_micro_batch_size_per_gpu", 1)
    whole = _integer(document, "train_batch_size", 0) or None
    accumulated = _integer(document, "gradient_accumulation_steps", 0)
    if whole is None and accumulated:
        whole = accumulated * micro_batch * ranks
    batch = Batch(known.seq_length, micro_batch, whole)
    return ModelFiles(_model(known), _deepspeed(document, ranks), batch)


def require_served(method: Method, cluster: Cluster) -> None:
    """Raise ValueError for a method that a cluster's engine refuses."""
    require_before(method.schedule.when, cluster.engine)
    require_hooks(method.schedule.when, cluster.captured_by)


def read_words(path: Path) -> list[str]:
    """Return the words of a file of flags, comments left out."""
    try:
        return shlex.split(read_text(path), comments=True)
    except ConfigError:
        raise
    except ValueError as error:  # of quotes
        raise ValueError(f"{path} holds no flags: {error}; close what is open") from None


def _parse(text: Sequence[str]) -> argparse.Namespace:
    """Read the sizes among Megatron's flags, with Megatron's defaults."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "vocab-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in (
        "ffn-hidden-size",
        "num-query-groups",
        "max-position-embeddings",
        "global-batch-size",
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--cuda-graph-impl", default="none")
    for name in (
        "swiglu", "bf16", "use-distributed-optimizer", "sequence-parallel", "add-qkv-bias",
        "disable-bias-linear", "untie-embeddings-and-output-weights", "group-query-attention",
        "enable-cuda-graph", "external-cuda-graph",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    for name in _UNKNOWN:
        if name in _UNKNOWN_SIZES:
            parser.add_argument(f"--{name}", type=int)
        else:
            parser.add_argument(f"--{name}", action="store_true")
    try:
        known = parser.parse_known_args(list(text))[0]
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    missing = [f"--{n.replace('_', '-')}" for n in needed if getattr(known, n) is None]
    if missing:
        raise ValueError(f"the flags lack {', '.join(missing)}")
    for name, value in vars(known).items():
        if isinstance(value, int) and not isinstance(value, bool):
            most = MAX_LAYERS if name == "num_layers" else MOST
            require_number(f"--{name.replace('_', '-')}", value, 1, most)
    _require_whole_heads(known)
    _require_dense_gpt(known)
    return known


def _require_whole_heads(known: argparse.Namespace) -> None:
    hidden, heads = known.hidden_size, known.num_attention_heads
    if hidden % heads:
        raise ValueError(
            f"--hidden-size={hidden} must be a multiple of --num-attention-heads={heads}; try "
            f"{-(-hidden // heads) * heads}"
        )


def _require_dense_gpt(known: argparse.Namespace) -> None:
    """Raise ValueError for flags with which a rank holds what no formula here tells."""
    given = {name: getattr(known, name.replace("-", "_")) for name in _UNKNOWN}
    if given["kv-channels"] == known.hidden_size // known.num_attention_heads:
        given["kv-channels"] = None
    if given["context-parallel-size"] == 1:
        given["context-parallel-size"] = None
    names = [f"--{name}" for name, value in given.items() if value]
    if names:
        raise ValueError(
            f"{', '.join(names)}: dsx memory plans dense GPTs in fp32 or bf16, with heads of "
            "hidden / heads channels and optimizer states on the accelerator; leave the flags out "
            "to plan such a model"
        )


def _model(known: argparse.Namespace) -> GPT:
    multiple = known.make_vocab_size_divisible_by * known.tensor_model_parallel_size
    groups = known.num_query_groups if known.group_query_attention else None
    is_learned = known.position_embedding_type == "learned_absolute"
    return GPT(
        layers=known.num_layers,
        hidden=known.hidden_size,
        ffn=known.ffn_hidden_size or 4 * known.hidden_size,
        heads=known.num_attention_heads,
        groups=groups or known.num_attention_heads,
        vocabulary=-(-known.vocab_size // multiple) * multiple,
        positions=(known.max_position_embeddings or known.seq_length) if is_learned else None,
        is_gated=known.swiglu,
        has_bias=not known.disable_bias_linear,
        has_qkv_bias=known.add_qkv_bias,
        is_rms_norm=known.normalization == "RMSNorm",
        is_tied=not known.untie_embeddings_and_output_weights,
    )


def _megatron(known: argparse.Namespace, ranks: int | None) -> Cluster:
    tensor, pipeline = known.tensor_model_parallel_size, known.pipeline_model_parallel_size
    ranks = tensor * pipeline if ranks is None else ranks
    if ranks % (tensor * pipeline):
        raise ValueError(f"--ranks {ranks} is no multiple of tensor {tensor} x pipeline {pipeline}")
    return Cluster(
        pipeline=pipeline,
        tensor=tensor,
        data=ranks // (tensor * pipeline),
        is_bf16=known.bf16,
        is_sharded=known.use_distributed_optimizer,
        is_sequence_parallel=known.sequence_parallel,
        captured_by=_captured_by(known),
    )


def _captured_by(known: argparse.Namespace) -> str | None:
    for name in ("enable-cuda-graph", "external-cuda-graph"):
        if getattr(known, name.replace("-", "_")):
            return f"--{name}"
    kind = known.cuda_graph_impl
    return None if kind == "none" else f"--cuda-graph-impl {kind}"


def _deepspeed(document: Mapping[str, Any], ranks: int) -> Cluster:
    """Read a cluster out of a DeepSpeed JSON; ValueError for what the formulas do not know."""
    zero: Any = document.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ValueError(f'zero_optimization={zero!r} must be an object; write {{"stage": 1}}')
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        if device != "none":
            raise ValueError(
                f"zero_optimization.{key}.device={device!r}: dsx memory knows inner states on the "
                f"accelerator only; leave {key} out to see what it would take there"
            )
    if "grad_accum_dtype" in document.get("data_types", {}):
        raise ValueError(
            "data_types.grad_accum_dtype: dsx memory knows gradients in the weights' type only; "
            "leave it out, and add the difference"
        )
    tensor: Any = document.get("tensor_parallel", {})
    for name, size in (
        ("tensor_parallel.autotp_size", tensor.get("autotp_size", 0)),
        ("sequence_parallel_size", document.get("sequence_parallel_size", 1)),
        ("zero_optimization.zero_hpz_partition_size", zero.get("zero_hpz_partition_size", 1)),
    ):
        if isinstance(size, int) and size > 1:
            raise ValueError(
                f"{name}={size}: a run trains with it, and dsx plans data parallelism and ZeRO "
                "alone; leave it out to see what a run takes without it"
            )
    precisions: list[Any] = [document.get(key, {}) for key in ("bf16", "fp16")]
    is_bit16 = any(precision.get("enabled") for precision in precisions)
    return Cluster(data=ranks, is_bf16=is_bit16, zero_stage=_integer(zero, "stage", 0))


def _integer(section: Mapping[str, Any], key: str, default: int) -> int:
    value = section.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be an integer; write the number of the planned run")
    return value


def _batch(known: argparse.Namespace) -> Batch:
    return Batch(known.seq_length, known.micro_batch_size, known.global_batch_size)


def stage_shapes(
    model: GPT, cluster: Cluster, stage: Stage
) -> tuple[list[ParameterShape], list[list[ParameterShape]]]:
    """Return what the stage's ranks train together, and each tensor-parallel rank's part."""
    weights = model.weights(stage, cluster.tensor)
    together: list[ParameterShape] = []
    parts: list[list[ParameterShape]] = [[] for _ in range(cluster.tensor)]
    for weight in weights:
        for rank in range(cluster.tensor):
            part = weight.on((rank, cluster.tensor))
            parts[rank].append(part)
            if weight.split is not None or rank == 0:
                together.append(part)
    return together, parts


def inner_of(model: GPT, cluster: Cluster, stage: Stage, held: int, batch: Batch) -> InnerMemory:
    """Return what the inner engine takes on a rank of a stage that holds so many elements."""
    activations = inner_memory.recomputed_activations(
        batch.sequence,
        batch.micro_batch,
        model.hidden,
        model.layers // cluster.pipeline,
        stage.count - stage.index,
        cluster.tensor,
        cluster.is_sequence_parallel,
    )
    if cluster.zero_stage is None:
        sharing = cluster.data if cluster.is_sharded else 1
        return inner_memory.megatron(held, cluster.is_bf16, sharing, activations)
    return inner_memory.deepspeed(
        held, cluster.is_bf16, cluster.zero_stage, cluster.data, activations
    )
