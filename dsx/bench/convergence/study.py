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
import json
import math
import multiprocessing
import os
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from convergence_report import BASELINE, plot, print_table
from convergence_runs import CODECS, Study, Task, run_task
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import dsx
from dsx.method.presets import PRESETS

UNTUNED = ("local_sgd", "dreamddp")  # their outer rule has no rate to choose


def run_all(study: Study, tasks: list[Task], jobs: int, kept: Path) -> dict[str, dict[str, Any]]:
    """Return the results by task key, from `kept` where they are there; the rest in processes."""
    done: dict[str, dict[str, Any]] = {}
    if kept.exists():
        lines = [line for line in kept.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept.write_text("".join(lines))  # without a line that an interruption has cut short
        for entry in map(json.loads, lines):
            if entry["study"] == asdict(study):
                done[entry["key"]] = entry["result"]
    missing = [task for task in tasks if task.key not in done]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        progress = bar.add_task("runs", total=len(missing))
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, prepare_worker) as pool, kept.open("a") as file:
            for task, result in pool.imap_unordered(Runner(study), missing):
                done[task.key] = result
                file.write(
                    json.dumps({"study": asdict(study), "key": task.key, "result": result}) + "\n"
                )
                file.flush()
                bar.update(progress, advance=1)
    return {task.key: done[task.key] for task in tasks}


def prepare_worker() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", dsx.SettingWarning)  # the grid goes beyond what is stable


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
        found = {r["preset"]: (r["lr"], r["momentum"]) for r in rows}
        return {n: Task(n, seed, *found[n.partition("+")[0]]) for n in arguments.presets}
    plain = dict.fromkeys(name.partition("+")[0] for name in arguments.presets)
    grid = {
        name: [Task(name, seed)]
        if name in UNTUNED
        else [Task(name, seed, lr, mu) for mu in arguments.momenta for lr in arguments.rates]
        for name in plain
    }
    tasks = [task for candidates in grid.values() for task in candidates]
    results = run_all(study, tasks, arguments.jobs, kept)

    def loss(task: Task) -> float:
        value = results[task.key]["val_loss"]
        return value if math.isfinite(value) else math.inf

    best = {name: min(candidates, key=loss) for name, candidates in grid.items()}
    return {n: replace(best[n.partition("+")[0]], preset=n) for n in arguments.presets}


def preset_name(text: str) -> str:
    """Return a name of --presets, PRESET or PRESET+CODEC, if there is such a thing."""
    preset, plus, codec = text.partition("+")
    if preset not in PRESETS or (plus and codec not in CODECS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PRESET or PRESET+CODEC; presets: {', '.join(PRESETS)}; "
            f"codecs: {', '.join(CODECS)}"
        )
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/stdlib"))
    add(
        "--presets", nargs="+", type=preset_name, default=list(PRESETS), metavar="PRESET[+CODEC]",
        help=f"presets: {', '.join(PRESETS)}; codecs: {', '.join(CODECS)}. A codec runs with the "
        "rate and momentum of its preset without one",
    )  # fmt: skip
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
