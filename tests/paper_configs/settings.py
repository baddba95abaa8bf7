"""The settings of a file in configs/paper by one set of names, whatever its form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsx.config.flags import block_of_flags
from dsx.config.schema import load_config
from dsx.plan.memory.show import read_plan
from dsx.plan.model_files import read_words

FOLDER = Path(__file__).parents[2] / "configs" / "paper"
FILES = sorted(FOLDER.rglob("*.json")) + sorted(FOLDER.rglob("*.flags"))
IMAGES = FOLDER / "dreamddp" / "resnet18.json"  # of scripts/vision.py, which has its own sizes

_OF_METHOD = {  # section, key of the "dsx" block
    ("schedule", "interval"): "H", ("schedule", "gamma"): "gamma", ("schedule", "type"): "schedule",
    ("schedule", "when"): "when", ("compression", "random_ratio"): "random_ratio",
    ("compression", "top_k_ratio"): "top_k_ratio",
    ("delay", "steps"): "tau", ("delay", "alpha"): "alpha", ("delay", "strength"): "strength",
    ("delay", "mode"): "mode", ("delay", "outer_steps"): "outer_steps",
    ("fragments", "num_fragments"): "num_fragments", ("fragments", "pattern"): "pattern",
    ("fragments", "by"): "by", ("compression", "wire"): "wire",
    ("compression", "type"): "compression", ("compression", "error_feedback"): "error_feedback",
    ("control", "type"): "control", ("control", "rank"): "rank",
    ("control", "max_rank"): "max_rank", ("control", "window"): "window",
    ("staleness", "granularity"): "granularity",
    ("outer_optimizer", "lr"): "outer_lr", ("outer_optimizer", "momentum"): "outer_momentum",
    ("state", "device"): "state",
}  # fmt: skip
_OWN = {"factor_wire": "factor_wire", "own_wire": "wire"}  # as the preset has it, if not given
_BITS = {"int4": 4, "fp16": 16}


def name_of(file: Path) -> str:
    """Return "paper/run"."""
    return f"{file.parent.name}/{file.stem}"


def read(file: Path) -> dict[str, Any]:
    """Return every setting that a file gives; KeyError for one that has no name here."""
    if file == IMAGES:
        document = json.loads(file.read_text())
        assert set(document) == {"dsx"}
        return _of_method(document["dsx"])
    found = _of_json(file) if file.suffix == ".json" else _of_flags(file)
    found["tokens"] = found["steps"] * found["batch"] * found["sequence"]
    found["tokens_per_step"] = found["batch"] * found["sequence"]
    if found["preset"] == "cocktail_sgd":
        found["compression_ratio"] = 4 / (found["random_ratio"] * found["top_k_ratio"])
    if found.get("wire", found["own_wire"]) in _BITS:
        bits = _BITS[found.get("wire", found["own_wire"])]
        found["compression_ratio"] = found["H"] * 16 / bits  # from FP16
    return found


def given(file: Path) -> dict[str, Any]:
    """Return what stands in the file, without what follows from it."""
    follows = {"tokens", "tokens_per_step", "compression_ratio", "parameters", "ranks", *_OWN}
    return {key: value for key, value in read(file).items() if key not in follows}


def _of_method(block: dict[str, Any]) -> dict[str, Any]:
    found = {"preset": block.pop("preset"), "clusters": block.pop("clusters")["num_clusters"]}
    for section, keys in block.items():
        for key, value in keys.items():
            found[_OF_METHOD[section, key]] = value
    return found


def _of_json(file: Path) -> dict[str, Any]:
    document = json.loads(file.read_text())
    axes = load_config(document).axes
    sizes, block = document.pop("pretrain_gpt"), document.pop("dsx")
    found = _of_method(block)
    found |= {key: axes["compression"].get(name) for key, name in _OWN.items()}
    found |= {"sequence": sizes.pop("sequence_length"), "pipeline": sizes.pop("pipeline_stages", 1)}
    found |= sizes
    found["batch"] = document.pop("train_batch_size") * found["clusters"]
    found["micro_batch"] = document.pop("train_micro_batch_size_per_gpu")
    if "gradient_clipping" in document:
        found["clip"] = document.pop("gradient_clipping")
    found |= {
        "zero": document.pop("zero_optimization")["stage"],
        "bf16": document.pop("bf16")["enabled"],
    }
    optimizer = document.pop("optimizer")
    found |= {"optimizer": optimizer["type"], "beta1": optimizer["params"]["betas"][0]}
    found |= {"lr": optimizer["params"]["lr"], "beta2": optimizer["params"]["betas"][1]}
    found["weight_decay"] = optimizer["params"]["weight_decay"]
    scheduler: Any = document.pop("scheduler", None)
    if scheduler and scheduler["type"] == "CyclicLR":
        params = scheduler["params"]
        assert params.pop("max_lr") == found["lr"] and not params.pop("cycle_momentum")
        found |= {"decay": params.pop("mode"), "warm_up": params.pop("step_size_up")}
        found["least_lr"] = params.pop("base_lr")
        assert not params
    elif scheduler:
        assert scheduler["type"] == "WarmupCosineLR"
        params = scheduler["params"]
        assert params.pop("total_num_steps") == found["steps"]
        assert params.pop("warmup_type") == "linear"
        found |= {"decay": "cosine", "warm_up": params.pop("warmup_num_steps")}
        found["least_lr"] = params.pop("cos_min_ratio") * found["lr"]
        assert not params
    assert not document, f"{file} has settings that nothing checks: {document}"
    return found


def _of_flags(file: Path) -> dict[str, Any]:
    planned, words = read_plan(file, None, None), read_words(file)
    config = load_config(block_of_flags(words))
    found = _of_method(block_of_flags(words)["dsx"])
    found |= {key: config.axes["compression"].get(name) for key, name in _OWN.items()}
    flags = {w: v for w, v in zip(words, [*words[1:], "--"], strict=True) if w.startswith("--")}
    flags = {w.removeprefix("--"): v for w, v in flags.items() if not w.startswith("--dsx-")}
    model, cluster = planned.model, planned.cluster
    found |= {"layers": model.layers, "hidden": model.hidden, "heads": model.heads}
    found |= {"vocabulary": int(flags["vocab-size"]), "tied": model.is_tied}
    found |= {"tensor": cluster.tensor, "pipeline": cluster.pipeline, "bf16": cluster.is_bf16}
    if "qk-layernorm" in flags:
        found["qk_norm"] = True
    if model.groups != model.heads:
        found["query_groups"] = model.groups
    found |= {"parameters": model.numel, "ranks": cluster.ranks * found["clusters"]}
    found["batch"] = int(flags["global-batch-size"]) * found["clusters"]
    found |= {"sequence": int(flags["seq-length"]), "steps": int(flags["train-iters"])}
    found["micro_batch"] = int(flags["micro-batch-size"])
    found |= {"lr": float(flags["lr"]), "weight_decay": float(flags["weight-decay"])}
    found |= {"beta1": float(flags["adam-beta1"]), "beta2": float(flags["adam-beta2"])}
    if flags["lr-decay-style"] != "constant":
        found |= {"decay": flags["lr-decay-style"], "warm_up": int(flags["lr-warmup-iters"])}
        found["least_lr"] = float(flags["min-lr"])
    if "clip-grad" in flags:
        found["clip"] = float(flags["clip-grad"])
    return found
