"""A convergence study: tune every preset on one grid, run the choices, compare them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import dsx
from dsx.bench.convergence.figures import add_reached, common_target
from dsx.bench.convergence.leaderboard import LENGTHS, Lengths, summarize
from dsx.bench.convergence.pool import run_all
from dsx.bench.convergence.problems import PROBLEMS
from dsx.bench.convergence.report import plot, print_table
from dsx.bench.convergence.runs import run_task
from dsx.bench.convergence.task import (
    BASELINE,
    CODECS,
    OUTER_BASELINE,
    UNTUNED,
    VARIANTS,
    Inner,
    Own,
    Study,
    Task,
    overrides,
    without_codec,
)
from dsx.core.checks import require_choice
from dsx.data.shards import Shards
from dsx.method.choices import PRESETS

INNER_LRS, RESTS = "1.5e-3,3e-3,6e-3", "1,2"  # as many tries as outer rates and momenta by default
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Search:
    """What is compared, and the grids that are searched; `settings` are an earlier study's rows.

    `inner_lrs` and `rest_rates` are data parallel's grid, and what it finds best is for all, times
    one of `owns`, which are a preset's grid beside outer rates and momenta.
    """

    presets: Sequence[str]
    rates: Sequence[float]
    momenta: Sequence[float]
    seeds: Sequence[int]
    settings: Path | None
    inner_lrs: Sequence[float]
    rest_rates: Sequence[float]
    owns: Sequence[Own] = (Own(),)

    def tries(self, preset: str) -> int:
        """Return how many settings a preset is chosen from; an earlier study's number for its."""
        if preset == BASELINE:
            return len(self.inner_lrs) * len(self.rest_rates)
        if self.settings is not None:
            return read_settings(self.settings)[without_codec(preset)].get("tries", 1)
        outer = 1 if is_untuned(preset) else len(self.rates) * len(self.momenta)
        return outer * len(self.owns)


def tune_baseline(study: Study, search: Search, jobs: int, kept: Path) -> Study:
    """Return the study with the inner rates that data parallel does best with, at the first seed.

    ValueError if it has diverged with all.
    """
    grid = [
        replace(study, inner_lr=lr, rest_rate=rate)
        for rate in search.rest_rates
        for lr in search.inner_lrs
    ]
    if len(grid) == 1:
        return grid[0]
    task = Task(BASELINE, search.seeds[0])
    results = run_all([(candidate, task) for candidate in grid], jobs, kept, run_task)
    finite = [i for i, run in enumerate(results) if math.isfinite(run["val_loss"])]
    if not finite:
        raise ValueError(
            f"data parallel has diverged with every --inner-lr of {list(search.inner_lrs)}; "
            "try smaller ones"
        )
    return grid[min(finite, key=lambda i: results[i]["val_loss"])]


def choose(study: Study, search: Search, jobs: int, kept: Path) -> dict[str, Task]:
    """Return each preset's task of the first seed, with the best outer rate of the grid."""
    seed = search.seeds[0]
    if search.settings:
        found = read_settings(search.settings)
        rows = {n: found[without_codec(n)] for n in search.presets}
        return {
            n: Task(n, seed, row["lr"], row["momentum"], own=Own(**row.get("own", {})))
            for n, row in rows.items()
        }
    plain = dict.fromkeys(without_codec(name) for name in search.presets)
    grid = {
        name: [
            Task(name, seed, lr, mu, own=own)
            for own in search.owns
            for lr, mu in (
                [(None, None)]
                if is_untuned(name)
                else [(lr, mu) for mu in search.momenta for lr in search.rates]
            )
        ]
        for name in plain
    }
    tasks = [task for candidates in grid.values() for task in candidates]
    results = run_all([(study, task) for task in tasks], jobs, kept, run_task)
    losses = {task.key: run["val_loss"] for task, run in zip(tasks, results, strict=True)}

    def loss(task: Task) -> float:
        value = losses[task.key]
        return value if math.isfinite(value) else math.inf

    best = {name: min(candidates, key=loss) for name, candidates in grid.items()}
    return {n: replace(best[without_codec(n)], preset=n) for n in search.presets}


def read_presets(text: str | None) -> list[str]:
    """Read PRESET[+CODEC][+VARIANT] with commas between them; None: every preset."""
    names = list(PRESETS) if text is None else text.split(",")
    for name in names:
        preset, *further = name.split("+")
        codecs = [part for part in further if part in CODECS]
        known = len(codecs) <= 1 and {*further} <= {*CODECS, *VARIANTS}
        known = known and len({*further}) == len(further)
        known = known and sum(part.endswith("_residual") for part in further) <= 1
        if name != OUTER_BASELINE and (preset not in PRESETS or not known):
            raise ValueError(
                f"--presets {name!r} is not PRESET or PRESET+CODEC or PRESET+VARIANT; presets: "
                f"{', '.join(PRESETS)}; {OUTER_BASELINE}; codecs: {', '.join(CODECS)}; variants: "
                f"{', '.join(VARIANTS)}"
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


def is_untuned(preset: str) -> bool:
    """Return whether a preset's outer rule has no rate to choose, whatever its variant."""
    return preset.split("+")[0] in UNTUNED


@lru_cache
def read_settings(file: Path) -> dict[str, dict[str, Any]]:
    """Return an earlier study's rows by preset."""
    return {row["preset"]: row for row in json.loads(file.read_text())}


def read_search(
    presets: str | None,
    rates: str,
    momenta: str,
    seeds: str,
    settings: Path | None,
    inner_lrs: str | None,
    rest_rates: str | None,
    owns: Sequence[Own] = (Own(),),
) -> Search:
    """Read what the command line says of the search.

    Inner rates that are not said are those of `settings`, or as many as there are outer ones by
    default. ValueError if `settings` lacks a preset.
    """
    names = read_presets(presets)
    earlier: dict[str, Any] = {}
    if settings is not None:
        found = read_settings(settings)
        if missing := sorted({without_codec(n) for n in names} - found.keys()):
            raise ValueError(
                f"--settings {settings} has no row of {', '.join(missing)}; it has "
                f"{', '.join(found)}: name those as --presets, or leave --settings out"
            )
        earlier = found.get(BASELINE, {})
    return Search(
        names,
        read_numbers("--rates", rates, float),
        read_numbers("--momenta", momenta, float),
        read_numbers("--seeds", seeds, int),
        settings,
        read_numbers("--inner-lr", inner_lrs or str(earlier.get("inner_lr", INNER_LRS)), float),
        read_numbers("--rest-rate", rest_rates or str(earlier.get("rest_rate", RESTS)), float),
        owns,
    )


def read_owns(lr: str, rest: str, decay: str) -> list[Own]:
    """Read a preset's own inner settings, in data parallel's: the product of three lists."""
    lists = (
        read_numbers("--own-lr", lr, float),
        read_numbers("--own-rest", rest, float),
        read_numbers("--own-decay", decay, float),
    )
    return [Own(*values) for values in product(*lists)]


def require_runnable(study: Study, search: Search) -> None:
    """Raise ValueError for a preset that this study, or a variant of it, cannot run."""
    for name in search.presets:
        if name == OUTER_BASELINE:
            continue
        preset = name.split("+")[0]
        late = dsx.preset(preset, study.num_clusters).delay.rounds_under_way
        if "shift" in name.split("+") and late != 1:
            raise ValueError(
                f"--presets {name!r}: +shift keeps the progress of presets that are one period "
                f"late, and {preset} is none; try diloco_delayed+shift, or {preset}+serial"
            )
        tuned = search.settings is None and not is_untuned(name)
        rates = (search.rates[0], search.momenta[0]) if tuned else (None, None)
        try:
            dsx.preset(preset, study.num_clusters, **overrides(study, Task(name, 0, *rates)))
        except ValueError as error:
            raise ValueError(f"--presets {name!r} cannot run: {error}") from None


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
        Task(name, seed, task.lr, task.momentum, own=task.own)
        for name, task in {BASELINE: Task(BASELINE, 0), **chosen}.items()
        for seed in seeds
    ]
    rows = run_all([(study, task) for task in tasks], jobs, kept, run_task)
    baseline = {row["seed"]: row["val_loss"] for row in rows if row["preset"] == BASELINE}
    for row in rows:
        row["gap_percent"] = 100 * (row["val_loss"] / baseline[row["seed"]] - 1)
    return rows


def run_lengths(study: Study, seeds: Sequence[int], jobs: int, kept: Path) -> Lengths:
    """Return steps and losses of whole data-parallel runs of each seed, shorter ones and this."""
    steps = [*(max(1, study.num_steps // part) for part in LENGTHS), study.num_steps]
    runs = [(replace(study, num_steps=n), Task(BASELINE, seed)) for seed in seeds for n in steps]
    losses = [run["val_loss"] for run in run_all(runs, jobs, kept, run_task)]
    found = iter(losses)
    return {seed: [(n, next(found)) for n in steps] for seed in seeds}


def compare(
    study: Study, search: Search, jobs: int, out: Path, figure: Path | None, target: float | None
) -> None:
    """Run the study; write the table to `out` and single runs beside it, draw them, print it.

    `target` is the loss that steps and bytes are counted to; None: the least that all runs reach.
    FileNotFoundError if there is no dataset.
    """
    require_study(study)
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = out.with_suffix(".runs.jsonl")
    require_runnable(study, search)
    study = tune_baseline(study, search, jobs, kept)
    chosen = choose(study, search, jobs, kept)
    rows = run_chosen(study, chosen, search.seeds, jobs, kept)
    target = common_target(rows) if target is None else target
    for row in rows:
        add_reached(row, target)
    single = out.with_suffix(".single.json")
    single.write_text(json.dumps(rows, indent=1) + "\n")
    tries = {name: search.tries(name) for name in (BASELINE, *search.presets)}
    table = summarize(rows, study, tries, run_lengths(study, search.seeds, jobs, kept))
    out.write_text(json.dumps(table, indent=1) + "\n")
    figure = figure or out.with_suffix(".png")
    plot(rows, study, figure)
    kind = "" if study.shards == "iid" else f", {study.shards} shards"
    kind += "" if study.problem == "causal" else f", {study.problem}"
    title = f"{study.num_clusters} clusters, H = {study.interval}, {study.num_steps} steps{kind}"
    print_table(table, rows, title, target)
    print(f"results in {out}, single runs in {single}, figure in {figure}")
