"""A convergence study: tune every preset on one grid, run the choices, compare them."""

from __future__ import annotations

import json
import math
import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import dsx
from dsx.bench.convergence.report import BASELINE, plot, print_table
from dsx.bench.convergence.runs import CODECS, Study, Task, run_task
from dsx.method.choices import PRESETS

UNTUNED = ("local_sgd", "dreamddp", "cocktail_sgd")  # their outer rule has no rate to choose
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Search:
    """What is compared, and the grid that is searched; `settings` are an earlier study's rows."""

    presets: Sequence[str]
    rates: Sequence[float]
    momenta: Sequence[float]
    seeds: Sequence[int]
    settings: Path | None


def run_all(study: Study, tasks: list[Task], jobs: int, kept: Path) -> dict[str, dict[str, Any]]:
    """Return the results by task key, from `kept` where they are there; the rest in processes."""
    done: dict[str, dict[str, Any]] = {}
    if kept.exists():
        lines = [line for line in kept.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept.write_text("".join(lines))  # without a line that an interruption has cut short
        for entry in map(json.loads, lines):
            if {"shards": "iid", **entry["study"]} == asdict(study):  # once there was one kind
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
    """Set up a process of the pool."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", dsx.SettingWarning)  # the grid goes beyond what is stable


@dataclass(frozen=True)
class Runner:
    """What a worker process calls."""

    study: Study

    def __call__(self, task: Task) -> tuple[Task, dict[str, Any]]:
        """Run a task; it comes back with its result, which may overtake others."""
        return task, run_task(self.study, task)


def choose(study: Study, search: Search, jobs: int, kept: Path) -> dict[str, Task]:
    """Return each preset's task of the first seed, with the best outer rate of the grid."""
    seed = search.seeds[0]
    if search.settings:
        rows = json.loads(search.settings.read_text())
        found = {r["preset"]: (r["lr"], r["momentum"]) for r in rows}
        return {n: Task(n, seed, *found[n.partition("+")[0]]) for n in search.presets}
    plain = dict.fromkeys(name.partition("+")[0] for name in search.presets)
    grid = {
        name: [Task(name, seed)]
        if name in UNTUNED
        else [Task(name, seed, lr, mu) for mu in search.momenta for lr in search.rates]
        for name in plain
    }
    tasks = [task for candidates in grid.values() for task in candidates]
    results = run_all(study, tasks, jobs, kept)

    def loss(task: Task) -> float:
        value = results[task.key]["val_loss"]
        return value if math.isfinite(value) else math.inf

    best = {name: min(candidates, key=loss) for name, candidates in grid.items()}
    return {n: replace(best[n.partition("+")[0]], preset=n) for n in search.presets}


def read_presets(text: str | None) -> list[str]:
    """Read PRESET or PRESET+CODEC with commas between them; None: every preset."""
    names = list(PRESETS) if text is None else text.split(",")
    for name in names:
        preset, plus, codec = name.partition("+")
        if preset not in PRESETS or (plus and codec not in CODECS):
            raise ValueError(
                f"--presets {name!r} is not PRESET or PRESET+CODEC; presets: "
                f"{', '.join(PRESETS)}; codecs: {', '.join(CODECS)}"
            )
    return names


def read_numbers(option: str, text: str, kind: Callable[[str], _Number]) -> list[_Number]:
    """Read numbers with commas between them."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{option} {text!r} must be numbers with commas between; try 0,1"
        ) from None


def compare(study: Study, search: Search, jobs: int, out: Path, figure: Path | None) -> None:
    """Run the study; write the results to `out`, draw them, print a table.

    FileNotFoundError if there is no dataset.
    """
    if not (Path(study.data) / "train.bin").exists():
        fix = f"dsx data build --from stdlib --out {study.data}"
        raise FileNotFoundError(f"no corpus at {study.data}; make one with: {fix}")
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = out.with_suffix(".runs.jsonl")
    chosen = choose(study, search, jobs, kept)
    tasks = [
        Task(name, seed, task.lr, task.momentum)
        for name, task in {BASELINE: Task(BASELINE, 0), **chosen}.items()
        for seed in search.seeds
    ]
    results = run_all(study, tasks, jobs, kept)
    rows = [results[task.key] for task in tasks]
    baseline = {row["seed"]: row["val_loss"] for row in rows if row["preset"] == BASELINE}
    for row in rows:
        row["gap_percent"] = 100 * (row["val_loss"] / baseline[row["seed"]] - 1)
    out.write_text(json.dumps(rows, indent=1) + "\n")
    figure = figure or out.with_suffix(".png")
    plot(rows, study.interval, figure)
    kind = "" if study.shards == "iid" else f", {study.shards} shards"
    print_table(
        rows, f"{study.num_clusters} clusters, H = {study.interval}, {study.num_steps} steps{kind}"
    )
    print(f"results in {out}, figure in {figure}")
