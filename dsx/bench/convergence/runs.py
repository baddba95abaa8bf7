"""One run of a convergence study: a preset, or the data-parallel baseline, on real text."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsx
from dsx.bench.convergence.report import BASELINE
from dsx.core.checks import require_choice
from dsx.data import ClusterBatches, TokenWindows, read_summary
from dsx.data.shards import Shards
from dsx.examples.gpt import GPT, GPTConfig

_LOW_RANK = {"type": "low_rank", "rank": 16, "factor_wire": "int8", "error_feedback": "fp32"}

# What "PRESET+CODEC" means: the preset's choices, with its pseudo-gradients sent so.
CODECS: dict[str, dict[str, Any]] = {
    "fp32": {"type": "dense"},
    "bf16": {"type": "quantized", "wire": "bf16", "mean_wire": "bf16"},
    "int8": {"type": "quantized", "wire": "int8"},
    "int4": {"type": "quantized", "wire": "int4"},
    "int4_ef": {"type": "quantized", "wire": "int4", "error_feedback": "fp32"},
    "fp4_e3m0": {"type": "quantized", "wire": "fp4_e3m0"},
    "ternary": {"type": "quantized", "wire": "ternary"},
    "ternary_ef": {"type": "quantized", "wire": "ternary", "error_feedback": "fp32"},
    "low_rank": {**_LOW_RANK},
    "low_rank_dense_start": {**_LOW_RANK, "dense_rounds": 5},
    "top_k": {"type": "top_k"},
    "random_top_k": {"type": "random_top_k"},
}


@dataclass(frozen=True)
class Study:
    """What all runs of a study share."""

    data: str
    num_clusters: int
    num_steps: int
    interval: int
    batch_size: int
    sequence_length: int
    num_layers: int
    hidden_size: int
    num_heads: int
    inner_lr: float
    num_evaluations: int
    validation_windows: int
    device: str
    shards: Shards = "iid"

    def __post_init__(self) -> None:
        require_choice("--shards", self.shards, Shards)


@dataclass(frozen=True)
class Task:
    """One run: a preset with an outer rate and momentum (None: as the preset has them).

    `preset` may name a codec, too: "diloco+int4".
    """

    preset: str
    seed: int
    lr: float | None = None
    momentum: float | None = None

    @property
    def key(self) -> str:
        """Return the name a finished run is kept under."""
        return f"{self.preset}/{self.seed}/{self.lr}/{self.momentum}"


def overrides(study: Study, task: Task) -> dict[str, dict[str, Any]]:
    """Return the axes of a preset in this study: H for all, and links that all can live with.

    Times are in units of one inner step. CoCoDC may send half as often again as Streaming DiLoCo;
    DreamDDP's link leaves no idle time to fill; DiLoCoX's lets H fall to about a half. CocktailSGD
    is a method of every step.
    """
    preset, _, codec = task.preset.partition("+")
    interval, layers = study.interval, study.num_layers
    axes: dict[str, dict[str, Any]] = {"schedule": {"interval": interval}}
    num_fragments = min(4, layers)
    if preset == "cocktail_sgd":
        axes["schedule"] = {"interval": 1}
    if codec:
        axes["compression"] = CODECS[codec]
    if preset in ("streaming_diloco", "cocodc", "dilocox"):
        axes["fragments"] = {"num_fragments": num_fragments}
    if preset == "cocodc":
        seconds = 0.4 * interval / (1.5 * num_fragments)
        axes["schedule"] |= {"gamma": 0.4, "step_seconds": 1.0, "transfer_seconds": seconds}
    if preset == "dilocox":
        control = {"rank": 16, "max_rank": 64, "step_seconds": 1.0, "round_seconds": 0.4 * interval}
        axes["control"] = {**control, "min_interval": num_fragments}
    if preset == "dreamddp":
        axes["schedule"] |= {
            "backward_seconds": [1.0 / layers] * layers,
            "transfer_seconds": [1.0] * layers,
        }
    if task.lr is not None:
        axes["outer_optimizer"] = {"lr": task.lr, "momentum": task.momentum}
    return axes


def inner_rate(study: Study, step: int) -> float:
    """Linear warmup over a twentieth of the run, then a cosine down to a tenth."""
    warmup = max(1, study.num_steps // 20)
    if step <= warmup:
        return study.inner_lr * step / warmup
    progress = (step - warmup) / max(1, study.num_steps - warmup)
    return study.inner_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: nn.Module, study: Study) -> torch.optim.Optimizer:
    """Return the inner AdamW of every run."""
    rate = study.inner_lr
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, lr: float
) -> None:
    """Take one inner step on windows `[batch, length + 1]`."""
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    model(windows[:, :-1], windows[:, 1:]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor) -> float:
    """Return the mean loss on held-out windows."""
    model.eval()
    losses = [model(part[:, :-1], part[:, 1:]).item() * len(part) for part in windows.split(32)]
    model.train()
    return sum(losses) / len(windows)


def run_task(study: Study, task: Task) -> dict[str, Any]:
    """Train one preset, or the baseline, and return its result."""
    started = time.perf_counter()
    torch.manual_seed(task.seed)
    device = torch.device(study.device)
    shape = (study.num_layers, study.hidden_size, study.num_heads, study.sequence_length)
    vocab_size = read_summary(study.data).vocab_size
    model = GPT(GPTConfig(*shape, vocab_size=vocab_size), task.seed).to(device)
    train = TokenWindows(Path(study.data) / "train", study.sequence_length)
    held_out = TokenWindows(Path(study.data) / "validation", study.sequence_length)
    count = min(study.validation_windows, len(held_out))
    chosen = [i * len(held_out) // count for i in range(count)]
    validation = torch.stack([held_out[i] for i in chosen]).to(device)
    batches = [
        ClusterBatches(
            train,
            study.batch_size,
            cluster_id=m,
            num_clusters=study.num_clusters,
            rank=0,
            world_size=1,
            seed=task.seed,
            shards=study.shards,
        )
        for m in range(study.num_clusters)
    ]
    step_batches = ([next(b).to(device) for b in batches] for _ in range(study.num_steps))
    run = train_baseline if task.preset == BASELINE else train_preset
    result = run(study, task, model, step_batches, validation)
    return {
        "preset": task.preset,
        "seed": task.seed,
        "lr": task.lr,
        "momentum": task.momentum,
        **result,
        "seconds": time.perf_counter() - started,
    }


def evaluation_steps(study: Study) -> set[int]:
    """Return the steps to evaluate at: at the ends of periods, the last step among them."""
    count = study.num_evaluations
    steps = {study.num_steps * (i + 1) // count for i in range(count)}
    return {min(study.num_steps, -(-s // study.interval) * study.interval) for s in steps}


def train_baseline(
    study: Study, task: Task, model: nn.Module, batches: Iterator[list[Tensor]], validation: Tensor
) -> dict[str, Any]:
    """Synchronous data parallel: every step takes the mean gradient of all clusters' batches."""
    optimizer = make_optimizer(model, study)
    curve: list[tuple[int, float]] = []
    for step, windows in enumerate(batches, start=1):
        take_step(model, optimizer, torch.cat(windows), inner_rate(study, step))
        if step in evaluation_steps(study):
            curve.append((step, evaluate(model, validation)))
    num_bytes = sum(4 * p.numel() for p in model.parameters())
    ring = 2 * (study.num_clusters - 1) * num_bytes // study.num_clusters
    return {
        "val_loss": curve[-1][1], "curve": curve, "bytes_per_cluster": ring * study.num_steps,
        "syncs": study.num_steps, "settings": {},
    }  # fmt: skip


def train_preset(
    study: Study, task: Task, model: nn.Module, batches: Iterator[list[Tensor]], validation: Tensor
) -> dict[str, Any]:
    """C clusters under a preset; the loss is that of the model a finished run hands out."""
    axes = overrides(study, task)
    method = dsx.preset(task.preset.partition("+")[0], study.num_clusters, **axes)
    models = [copy.deepcopy(model) for _ in range(study.num_clusters)]
    optimizers = [make_optimizer(m, study) for m in models]
    clusters = dsx.SimulatedClusters(models, optimizers, method)
    curve: list[tuple[int, float]] = []
    sent = evaluated = 0
    for step, windows in enumerate(batches, start=1):
        lr = inner_rate(study, step)
        for own, optimizer, part in zip(models, optimizers, windows, strict=True):
            take_step(own, optimizer, part, lr)
        clusters.step()
        if step == study.num_steps:
            clusters.finish()
        sent = max(clusters.bytes_sent) - evaluated
        if step in evaluation_steps(study):
            with clusters.averaged() as average:  # where that takes a mean, it is sent, too
                curve.append((step, evaluate(average, validation)))
            evaluated = max(clusters.bytes_sent) - sent
    fragments = len(clusters.loops[0].adapter.fragments)  # syncs are of whole models
    return {
        "val_loss": curve[-1][1], "curve": curve, "bytes_per_cluster": sent,
        "syncs": clusters.num_syncs / fragments, "settings": axes,
    }  # fmt: skip
