"""A convergence study: tune every preset on one grid, run the choices, compare them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dsx.bench.convergence.figures import add_reached, common_target
from dsx.bench.convergence.pool import run_all
from dsx.bench.convergence.problems import PROBLEMS
from dsx.bench.convergence.report import plot, print_table
from dsx.bench.convergence.runs import run_task
from dsx.bench.convergence.task import BASELINE, CODECS, UNTUNED, Inner, Study, Task
from dsx.core.checks import require_choice
from dsx.data.shards import Shards
from dsx.method.choices import PRESETS

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Search:
    """What is compared, and the grid that is searched; `settings` are an earlier study's rows."""

    presets: Sequence[str]
    rates: Sequence[float]
    momenta: Sequence[float]
    seeds: Sequence[int]
    settings: Path | None


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
    results = run_all([(study, task) for task in tasks], jobs, kept, run_task)
    losses = {task.key: run["val_loss"] for task, run in zip(tasks, results, strict=True)}

    def loss(task: Task) -> float:
        value = losses[task.key]
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


def read_search(
    presets: str | None, rates: str, momenta: str, seeds: str, settings: Path | None
) -> Search:
    """Read what the command line says of the search."""
    return Search(
        read_presets(presets),
        read_numbers("--rates", rates, float),
        read_numbers("--momenta", momenta, float),
        read_numbers("--seeds", seeds, int),
        settings,
    )


def require_corpus(study: Study) -> None:
    """Raise FileNotFoundError, with what makes one, if a problem of language has no dataset."""
    data = Path(study.data)
    if study.problem != "images" and not (data / "train.bin").exists():
        fix = f"dsx data build --from stdlib --out {data}"
        raise FileNotFoundError(f"no corpus at {data}; make one with: {fix}")


def require_study(study: Study) -> None:
    """Raise ValueError for a choice that there is not, FileNotFoundError if there is no dataset."""
    require_choice("--shards", study.shards, Shards)
    require_choice("--inner", study.inner, Inner)
    if study.inner == "muon" and study.problem == "images":
        raise ValueError(
            "--inner muon is for matrices, and --problem images has none but its last layer's; use "
            "--inner adamw"
        )
    if study.problem not in PROBLEMS:
        raise ValueError(f"--problem {study.problem!r} must be one of {', '.join(PROBLEMS)}")
    require_corpus(study)


def run_chosen(
    study: Study, chosen: Mapping[str, Task], seeds: Sequence[int], jobs: int, kept: Path
) -> list[dict[str, Any]]:
    """Return the results of data parallel and every choice, for every seed, with their gaps."""
    tasks = [
        Task(name, seed, task.lr, task.momentum)
        for name, task in {BASELINE: Task(BASELINE, 0), **chosen}.items()
        for seed in seeds
    ]
    rows = run_all([(study, task) for task in tasks], jobs, kept, run_task)
    baseline = {row["seed"]: row["val_loss"] for row in rows if row["preset"] == BASELINE}
    for row in rows:
        row["gap_percent"] = 100 * (row["val_loss"] / baseline[row["seed"]] - 1)
    return rows


def compare(
    study: Study, search: Search, jobs: int, out: Path, figure: Path | None, target: float | None
) -> None:
    """Run the study; write the results to `out`, draw them, print a table.

    `target` is the loss that steps and bytes are counted to; None: the least that all runs reach.
    FileNotFoundError if there is no dataset.
    """
    require_study(study)
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = out.with_suffix(".runs.jsonl")
    chosen = choose(study, search, jobs, kept)
    rows = run_chosen(study, chosen, search.seeds, jobs, kept)
    target = common_target(rows) if target is None else target
    for row in rows:
        add_reached(row, target)
    out.write_text(json.dumps(rows, indent=1) + "\n")
    figure = figure or out.with_suffix(".png")
    plot(rows, study.interval, figure)
    kind = "" if study.shards == "iid" else f", {study.shards} shards"
    kind += "" if study.problem == "causal" else f", {study.problem}"
    print_table(
        rows,
        f"{study.num_clusters} clusters, H = {study.interval}, {study.num_steps} steps{kind}",
        target,
    )
    print(f"results in {out}, figure in {figure}")
