"""How much each method loses against synchronous data parallel, on real text, at equal tokens.

    dsx data build --from stdlib --out data/stdlib
    python scripts/convergence.py --json runs/convergence/results.json

C clusters in one process train the quickstart's kind of model, from the same weights and on the
same batches, under every preset. Outer learning rate and momentum are tuned for each preset on
one grid, the same for all, with the first seed; the choice then runs with every seed. The
baseline is one model that takes the mean gradient of all clusters' batches in every step.

Results appear as a table, as JSON (one object per preset and seed) and as a plot. Finished runs
are kept beside the JSON file and not run again. `--settings FILE` takes the choices of an earlier
study instead of tuning, e.g. for a longer run of some presets.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from convergence_report import BASELINE, plot, print_table
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import dsx
from dsx.data import ClusterBatches, TokenWindows, read_summary
from dsx.presets import PRESETS

UNTUNED = ("local_sgd", "dreamddp")  # their outer rule has no rate to choose


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


@dataclass(frozen=True)
class Task:
    """One run: a preset with an outer rate and momentum (None: as the preset has them)."""

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
    DreamDDP's link leaves no idle time to fill; DiLoCoX's lets H fall to about a half.
    """
    interval, layers = study.interval, study.num_layers
    axes: dict[str, dict[str, Any]] = {"schedule": {"interval": interval}}
    num_fragments = min(4, layers)
    if task.preset in ("streaming_diloco", "cocodc", "dilocox"):
        axes["fragments"] = {"num_fragments": num_fragments}
    if task.preset == "cocodc":
        seconds = 0.4 * interval / (1.5 * num_fragments)
        axes["schedule"] |= {"gamma": 0.4, "step_seconds": 1.0, "transfer_seconds": seconds}
    if task.preset == "dilocox":
        control = {"rank": 16, "max_rank": 64, "step_seconds": 1.0, "round_seconds": 0.4 * interval}
        axes["control"] = {**control, "min_interval": num_fragments}
    if task.preset == "dreamddp":
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
    rate = study.inner_lr
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, lr: float
) -> None:
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    model(windows[:, :-1], windows[:, 1:]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor) -> float:
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
    method = dsx.preset(task.preset, study.num_clusters, **axes)
    models = [copy.deepcopy(model) for _ in range(study.num_clusters)]
    clusters = dsx.SimulatedClusters(models, [make_optimizer(m, study) for m in models], method)
    curve: list[tuple[int, float]] = []
    for step, windows in enumerate(batches, start=1):
        lr = inner_rate(study, step)
        for own, optimizer, part in zip(models, clusters.optimizers, windows, strict=True):
            take_step(own, optimizer, part, lr)
        clusters.step()
        if step == study.num_steps:
            clusters.finish()
        if step in evaluation_steps(study):
            with clusters.averaged() as average:
                curve.append((step, evaluate(average, validation)))
    fragments = len(clusters.loops[0].backend.fragments)  # syncs are of whole models
    return {
        "val_loss": curve[-1][1], "curve": curve, "bytes_per_cluster": max(clusters.bytes_sent),
        "syncs": clusters.num_syncs / fragments, "settings": axes,
    }  # fmt: skip


def run_all(study: Study, tasks: list[Task], jobs: int, kept: Path) -> dict[str, dict[str, Any]]:
    """Return the results by task key, from `kept` where they are there; the rest in processes."""
    done: dict[str, dict[str, Any]] = {}
    if kept.exists():
        for line in kept.read_text().splitlines():
            entry = json.loads(line)
            if entry["study"] == asdict(study):
                done[entry["key"]] = entry["result"]
    missing = [task for task in tasks if task.key not in done]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        progress = bar.add_task("runs", total=len(missing))
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, torch.set_num_threads, (1,)) as pool, kept.open("a") as file:
            for task, result in pool.imap_unordered(Runner(study), missing):
                done[task.key] = result
                file.write(
                    json.dumps({"study": asdict(study), "key": task.key, "result": result}) + "\n"
                )
                file.flush()
                bar.update(progress, advance=1)
    return {task.key: done[task.key] for task in tasks}


@dataclass(frozen=True)
class Runner:
    """What a worker process calls."""

    study: Study

    def __call__(self, task: Task) -> tuple[Task, dict[str, Any]]:
        """Run a task; it comes back with its result, which may overtake others."""
        return task, run_task(self.study, task)


def choose(arguments: argparse.Namespace, study: Study, kept: Path) -> dict[str, Task]:
    """Return each preset's task of the first seed, with the best outer rate of the grid."""
    seed = arguments.seeds[0]
    if arguments.settings:
        rows = json.loads(arguments.settings.read_text())
        found = {r["preset"]: Task(r["preset"], seed, r["lr"], r["momentum"]) for r in rows}
        return {name: found[name] for name in arguments.presets}
    grid = {
        name: [Task(name, seed)]
        if name in UNTUNED
        else [Task(name, seed, lr, mu) for mu in arguments.momenta for lr in arguments.rates]
        for name in arguments.presets
    }
    tasks = [task for candidates in grid.values() for task in candidates]
    results = run_all(study, tasks, arguments.jobs, kept)

    def loss(task: Task) -> float:
        value = results[task.key]["val_loss"]
        return value if math.isfinite(value) else math.inf

    return {name: min(candidates, key=loss) for name, candidates in grid.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/stdlib"))
    add("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    add("--clusters", type=int, default=4)
    add("--steps", type=int, default=800, help="inner steps of every run")
    add("--interval", type=int, default=20, help="H")
    add("--batch-size", type=int, default=4, help="windows per cluster and step")
    add("--sequence-length", type=int, default=64)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--inner-lr", type=float, default=3e-3)
    add("--rates", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="grid of outer rates")
    add("--momenta", type=float, nargs="+", default=[0.0, 0.5], help="grid of outer momenta")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--evaluations", type=int, default=10, help="along each run")
    add("--validation-windows", type=int, default=512)
    add("--settings", type=Path, help="JSON of an earlier study: take its choices, do not tune")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    add("--device", default="cpu")
    add("--json", type=Path, default=Path("runs/convergence/results.json"))
    add("--plot", type=Path, help="PNG file; beside the JSON file if not given")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if not (arguments.data / "train.bin").exists():
        fix = f"dsx data build --from stdlib --out {arguments.data}"
        print(f"error: no corpus at {arguments.data}; make one with: {fix}", file=sys.stderr)
        return 2
    study = Study(
        str(arguments.data), arguments.clusters, arguments.steps, arguments.interval,
        arguments.batch_size, arguments.sequence_length, arguments.layers, arguments.hidden,
        arguments.heads, arguments.inner_lr, arguments.evaluations, arguments.validation_windows,
        arguments.device,
    )  # fmt: skip
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    kept = arguments.json.with_suffix(".runs.jsonl")
    chosen = choose(arguments, study, kept)
    tasks = [
        Task(name, seed, task.lr, task.momentum)
        for name, task in {BASELINE: Task(BASELINE, 0), **chosen}.items()
        for seed in arguments.seeds
    ]
    results = run_all(study, tasks, arguments.jobs, kept)
    rows = [results[task.key] for task in tasks]
    baseline = {row["seed"]: row["val_loss"] for row in rows if row["preset"] == BASELINE}
    for row in rows:
        row["gap_percent"] = 100 * (row["val_loss"] / baseline[row["seed"]] - 1)
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    figure = arguments.plot or arguments.json.with_suffix(".png")
    plot(rows, arguments.interval, figure)
    print_table(
        rows, f"{study.num_clusters} clusters, H = {study.interval}, {study.num_steps} steps"
    )
    print(f"results in {arguments.json}, figure in {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
