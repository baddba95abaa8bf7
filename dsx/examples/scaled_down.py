"""A published configuration in a form that trains here within a minute: the method, a small model.

Kept are the preset and every choice, the codec, the engine's stage of ZeRO, whether there is a
pipeline or tensor parallelism and whether a stage has layers for several fragments, and ratios: of
tau to H, of the rank to the width, of warm-up to steps. Smaller are the model, the batch, H, the
number of clusters and of steps. Each change is told.

The sizes that a DeepSpeed JSON does not tell stand in it as "pretrain_gpt", with the names of the
arguments of pretrain_gpt_deepspeed.py; of a file of Megatron's flags they are flags.
"""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsx.config.files import ConfigError, read_json, read_text, shown
from dsx.config.flags import block_of_flags
from dsx.config.schema import load_config

SIZES = "pretrain_gpt"
SIZE_KEYS = ("layers", "hidden", "heads", "sequence_length", "steps", "pipeline_stages")
KEPT_KEYS = ("qk_norm", "z_loss")  # of the model, whatever its size
_CLUSTERS, _HIDDEN, _HEADS, _SEQUENCE, _LAYERS, _MICRO_BATCH = 2, 64, 4, 64, 4, 4
_BATCH, _INTERVAL, _ROUNDS, _DENSE_ROUNDS, _LEAST_STEPS = 8, 8, 6, 1, 48


@dataclass
class ScaledDown:
    """A configuration made small, the sizes of its model and run, and what was changed."""

    document: dict[str, Any]
    sizes: dict[str, Any]
    changes: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        return "scaled down: " + "; ".join(self.changes)


def read_sizes(document: Mapping[str, Any], file: str | Path) -> dict[str, Any]:
    """Return what "pretrain_gpt" says; ConfigError for a key or value that it cannot have."""
    given = document.get(SIZES, {})
    if not isinstance(given, Mapping):
        raise ConfigError(f'{file}: "{SIZES}" must be an object, not {shown(given)}')
    for key, value in given.items():
        if key not in SIZE_KEYS + KEPT_KEYS:
            known = ", ".join(SIZE_KEYS + KEPT_KEYS)
            raise ConfigError(f"{file}: {SIZES}.{key} is not known; allowed: {known}")
        if key in KEPT_KEYS:
            _require_kept(key, value, file)
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{file}: {SIZES}.{key}={shown(value)} must be a whole number of at least 1"
            )
    return dict(given)


def _require_kept(key: str, value: Any, file: str | Path) -> None:
    what = "true or false" if key == "qk_norm" else "a number of at least 0, such as 1e-4"
    is_number = isinstance(value, float) and 0 <= value < math.inf
    if not (isinstance(value, bool) if key == "qk_norm" else is_number):
        raise ConfigError(f"{file}: {SIZES}.{key}={shown(value)} must be {what}")


def scale_down_json(file: str | Path) -> ScaledDown:
    """Return a DeepSpeed JSON with a "dsx" block made small; ConfigError if it cannot be read."""
    document = copy.deepcopy(dict(read_json(file)))
    load_config(file)  # its errors name the key and the fix
    small = ScaledDown(document, read_sizes(document, file))
    _name_run(small, file)
    kept = {key: small.sizes[key] for key in KEPT_KEYS if key in small.sizes}
    steps = small.sizes.get("steps")
    _shrink_model(small, small.sizes.get("pipeline_stages", 1))
    _shrink_method(small, steps, small.sizes)
    _shrink_deepspeed(small, steps)
    small.sizes |= kept
    return small


def scale_down_flags(file: str | Path) -> tuple[ScaledDown, dict[str, Any]]:
    """Return the "dsx" block of a file of Megatron's flags made small, and Megatron's part.

    The latter are values by the names of pretrain_gpt_megatron.py's arguments. ConfigError if it
    cannot be read.
    """
    words = shlex.split(read_text(file), comments=True)
    known = _flags_of(words)
    names = {"layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    names |= {"sequence_length": "seq_length", "steps": "train_iters"}
    missing = [f"--{name.replace('_', '-')}" for name in names.values() if name not in known]
    if missing:
        raise ConfigError(f"{file} lacks {', '.join(missing)}; add what the published run has")
    sizes = {key: int(known[name]) for key, name in names.items()}
    small = ScaledDown(block_of_flags(words), sizes)
    _name_run(small, file)
    pipeline = int(known.get("pipeline_model_parallel_size", 1))
    tensor = int(known.get("tensor_model_parallel_size", 1))
    steps = sizes["steps"]
    small.sizes = {**sizes, "pipeline_stages": pipeline}
    _shrink_model(small, pipeline)
    _shrink_method(small, steps, small.sizes)
    megatron: dict[str, Any] = {names[key]: small.sizes[key] for key in names}
    megatron["pipeline_model_parallel_size"] = small.sizes["pipeline_stages"]
    megatron["tensor_model_parallel_size"] = _shrink(small, "tensor parallel", tensor, 2)
    megatron["micro_batch_size"] = _MICRO_BATCH
    was = known.get("global_batch_size")
    megatron["global_batch_size"] = _told(small, "batch of a cluster", int(was or 0), _BATCH)
    megatron["lr_warmup_iters"] = _warm_up(small, int(known.get("lr_warmup_iters", 0)), steps)
    for name in ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad"):
        if name in known:
            megatron[name] = float(known[name])
    for name in ("bf16", "use_distributed_optimizer", "untie_embeddings_and_output_weights"):
        megatron[name] = name in known
    small.changes.append("the model is the script's own: RMS norms, rotary positions, SwiGLU")
    return small, megatron


def _name_run(small: ScaledDown, file: str | Path) -> None:
    name = f"{Path(file).parent.name}_{Path(file).stem}"
    small.document["dsx"].setdefault("metrics", {}).setdefault("dir", f"runs/scaled_down/{name}")


def _flags_of(words: Sequence[str]) -> dict[str, str]:
    """Return Megatron's flags, their values as text, those of dsx left out."""
    found: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("--") and not word.startswith("--dsx-"):
            following = words[index + 1] if index + 1 < len(words) else "--"
            value = "" if following.startswith("--") else following
            found[word.removeprefix("--").replace("-", "_")] = value
    return found


def _shrink_model(small: ScaledDown, pipeline: int) -> None:
    """Make the model small: as many layers per stage as the file has, up to four."""
    sizes = small.sizes
    stages = _shrink(small, "pipeline stages", pipeline, 2)
    fragments = small.document["dsx"].get("fragments", {}).get("num_fragments")
    most = max(_LAYERS, fragments) if isinstance(fragments, int) else _LAYERS
    per_stage = min(most, max(1, sizes.get("layers", _LAYERS) // pipeline))
    small.sizes = {
        "layers": _told(small, "layers", sizes.get("layers"), stages * per_stage),
        "hidden": _told(small, "hidden", sizes.get("hidden"), _HIDDEN),
        "heads": _told(small, "heads", sizes.get("heads"), _HEADS),
        "sequence_length": _told(small, "sequence", sizes.get("sequence_length"), _SEQUENCE),
        "pipeline_stages": stages,
        "width_was": sizes.get("hidden", _HIDDEN),
    }


def _shrink_method(small: ScaledDown, steps: int | None, sizes: dict[str, Any]) -> None:
    """Make H, tau, ranks, the number of clusters and the steps of the run small."""
    block = small.document["dsx"]
    axes = load_config({"dsx": block}).axes
    fragments = axes["fragments"].get("num_fragments")
    was = axes["schedule"]["interval"]
    interval = min(was, max(_INTERVAL, fragments if isinstance(fragments, int) else 0))
    _set(small, "schedule", "interval", _told(small, "H", was, interval))
    tau = axes["delay"].get("steps")
    if tau:
        scaled = max(1, round(tau * interval / was))
        _set(small, "delay", "steps", _told(small, "tau", tau, scaled))
    width = sizes.pop("width_was")
    for key in ("rank", "max_rank", "min_rank"):
        rank = axes["control"].get(key)
        if rank:
            scaled = max(4, rank * _HIDDEN // width) if key != "min_rank" else min(rank, 4)
            _set(small, "control", key, _told(small, f"control.{key}", rank, scaled))
    if axes["control"].get("min_interval"):
        lowest = min(axes["control"]["min_interval"], max(1, interval // 2))
        _set(small, "control", "min_interval", lowest)
    if (axes["compression"].get("dense_rounds") or 0) > _DENSE_ROUNDS:
        was_dense = axes["compression"]["dense_rounds"]
        dense = _told(small, "compression.dense_rounds", was_dense, _DENSE_ROUNDS)
        _set(small, "compression", "dense_rounds", dense)
    clusters = block["clusters"]
    count = min(_CLUSTERS, clusters["num_clusters"])
    clusters["num_clusters"] = _told(small, "clusters", clusters["num_clusters"], count)
    clusters["rendezvous"] = "env://"
    rounds = max(_ROUNDS, -(-_LEAST_STEPS // interval))
    sizes["steps"] = _told(small, "steps", steps, rounds * interval)
    load_config(small.document)


def _shrink_deepspeed(small: ScaledDown, steps: int | None) -> None:
    """Make batch, schedule and optimizer of a DeepSpeed JSON what a CPU takes as well."""
    document = small.document
    pipeline = small.sizes["pipeline_stages"] > 1
    was = document.pop("train_batch_size", None)
    document["train_micro_batch_size_per_gpu"] = _MICRO_BATCH
    document["gradient_accumulation_steps"] = 2 if pipeline else 1
    per_rank = _MICRO_BATCH * document["gradient_accumulation_steps"]
    small.changes.append(f"batch {was or 'none'} of a cluster -> {per_rank} of a rank")
    schedule = document.get("scheduler", {}).get("params", {})
    for key in ("warmup_num_steps", "step_size_up"):  # of DeepSpeed, of torch's CyclicLR
        if key in schedule:
            schedule[key] = _warm_up(small, schedule[key], steps)
    optimizer = document.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 4e-4}})
    optimizer.setdefault("params", {})["torch_adam"] = True  # nothing to compile before the start
    document["steps_per_print"] = 10**9


def _warm_up(small: ScaledDown, warm_up: int, steps: int | None) -> int:
    scaled = max(2, round(small.sizes["steps"] * warm_up / (steps or small.sizes["steps"])))
    return _told(small, "warm-up", warm_up, scaled) if warm_up else 0


def _set(small: ScaledDown, section: str, key: str, value: int) -> None:
    small.document["dsx"].setdefault(section, {})[key] = value


def _shrink(small: ScaledDown, name: str, was: int, most: int) -> int:
    return _told(small, name, was, min(was, most))


def _told(small: ScaledDown, name: str, was: int | None, now: int) -> int:
    """Return `now`, after a note of the change where there is one."""
    if was != now:
        small.changes.append(f"{name} {'none' if was is None else was} -> {now}")
    return now
