"""The ways in which rows get their figures: training, a simulation, throttled lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer

from dsx.bench.convergence.task import BASELINE, UNTUNED, Study, Task
from dsx.bench.paper.table import Measure, Minutes, Row, Run, Samples

Grid = tuple[tuple[float, float], ...]  # outer learning rate, momentum


@dataclass(frozen=True)
class Loss:
    """Training on real text, C clusters in one process, as `dsx bench convergence` does it.

    Figures: val_loss, accuracy, perplexity, gap_percent (above data parallel of the same `study`
    and seed, or above the only row of it), divergence, bytes_per_cluster, syncs, and, with a
    `target` loss, steps_to_target and bytes_to_target (nan where it is not reached; "common": the
    least that all runs reach).

    `grid` has outer rates and momenta to choose from with the first seed, for rows that do not say
    their own. `run_task` names another function of (study, task) as "module:function", for what is
    not language; `full` and `short` are then its own frozen dataclasses.
    """

    full: Any
    short: Any
    full_and_short_minutes: Minutes
    seeds: tuple[int, ...] = (0, 1, 2)
    short_seeds: tuple[int, ...] = (0, 1)
    grid: Grid = ()
    target: float | str | None = None
    run_task: str = "dsx.bench.convergence.runs:run_task"
    kind = "loss"

    def minutes(self, rows: Sequence[Row], run: Run) -> float:
        """Return the declared minutes, less the share of the runs that are kept."""
        from dsx.bench.convergence.pool import identity, read_kept

        kept, function = read_kept(run.kept), self._function()
        tuning = [(row, r) for row in rows for r in self._candidates(row, run)]
        found = [kept.get(identity(*r, function)) for _, r in tuning]
        chosen = rows if None in found else self._choose(rows, tuning, found)
        runs = [r for row in chosen for r in self._runs(row, run, self._seeds(run))]
        asked = {identity(*r, function) for r in (*runs, *(r for _, r in tuning))}
        share = len(asked - kept.keys()) / len(asked)
        return self.full_and_short_minutes[run.short] * share * 2 / min(run.jobs, 2)

    def measure(self, rows: Sequence[Row], run: Run) -> Samples:
        """Tune, train every row with every seed, and return the figures."""
        from dsx.bench.convergence.figures import add_reached, common_target
        from dsx.bench.convergence.study import require_corpus

        for row in rows:
            require_corpus(self._study(row, run))
        chosen = self._tune(rows, run)
        runs = [(row, r) for row in chosen for r in self._runs(row, run, self._seeds(run))]
        results = self._run_all([r for _, r in runs], run)
        target = common_target(results) if self.target == "common" else self.target
        of_baseline = baselines(rows, [(row, r) for (row, _), r in zip(runs, results, strict=True)])
        samples: Samples = {row.label: {} for row in rows}
        for (row, _), result in zip(runs, results, strict=True):
            if isinstance(target, float):
                add_reached(result, target)
            base = of_baseline.get((row.label, result["seed"]))
            if base is not None:
                result["gap_percent"] = 100 * (result["val_loss"] / base - 1)
            for figure, value in result.items():
                if value is None and figure.endswith("_to_target"):
                    value = float("nan")
                if isinstance(value, int | float):
                    samples[row.label].setdefault(figure, []).append(value)
        return samples

    def _study(self, row: Row, run: Run) -> Any:
        study: Any = self.short if run.short else self.full
        if isinstance(study, Study):
            study = replace(study, data=str(run.data))
        return replace(study, **row.study)

    def _seeds(self, run: Run) -> tuple[int, ...]:
        return self.short_seeds if run.short else self.seeds

    def _runs(self, row: Row, run: Run, seeds: Sequence[int]) -> list[tuple[Any, Task]]:
        study = self._study(row, run)
        return [(study, Task(row.preset, seed, choices=row.overrides or None)) for seed in seeds]

    def _candidates(self, row: Row, run: Run) -> list[tuple[Any, Task]]:
        """Return the runs a row is tuned with: none, unless it leaves the outer rate open."""
        untuned = row.preset.partition("+")[0] in (BASELINE, *UNTUNED)
        if untuned or "outer_optimizer" in row.overrides:
            return []
        seeds = self._seeds(run)[:1]
        return [r for point in self.grid for r in self._runs(_at(row, *point), run, seeds)]

    def _tune(self, rows: Sequence[Row], run: Run) -> list[Row]:
        """Return the rows with the outer rate and momentum of the grid that are best for each."""
        runs = [(row, r) for row in rows for r in self._candidates(row, run)]
        chosen = self._choose(rows, runs, self._run_all([r for _, r in runs], run))
        for row in {row.label: row for row, _ in runs}:
            outer = next(c.overrides["outer_optimizer"] for c in chosen if c.label == row)
            typer.echo(f"{row}: outer lr {outer['lr']:g}, momentum {outer['momentum']:g}", err=True)
        return chosen

    def _choose(
        self, rows: Sequence[Row], runs: Sequence[tuple[Row, Any]], results: Sequence[Any]
    ) -> list[Row]:
        losses: dict[str, list[float]] = {}
        for (row, _), result in zip(runs, results, strict=True):
            loss = result["val_loss"]
            losses.setdefault(row.label, []).append(loss if loss == loss else float("inf"))
        return [
            _at(row, *self.grid[own.index(min(own))]) if (own := losses.get(row.label)) else row
            for row in rows
        ]

    def _run_all(self, runs: list[tuple[Any, Task]], run: Run) -> list[dict[str, Any]]:
        from dsx.bench.convergence.pool import run_all

        return run_all(runs, run.jobs, run.kept, self._function())

    def _function(self) -> Callable[[Any, Task], dict[str, Any]]:
        from importlib import import_module

        module, _, function = self.run_task.partition(":")
        return getattr(import_module(module), function)


def baselines(
    rows: Sequence[Row], results: Sequence[tuple[Row, Mapping[str, Any]]]
) -> dict[tuple[str, int], float]:
    """Return data parallel's loss for each label and seed, where there is one to compare with.

    Its row is the one with the same `study` but for H, or the only one there is.
    """

    def sizes(row: Row) -> dict[str, Any]:
        return {key: value for key, value in row.study.items() if key != "interval"}

    synchronous = [row for row in rows if row.preset == BASELINE]
    found: dict[tuple[str, int], float] = {}
    for row in rows:
        like = [s for s in synchronous if sizes(s) == sizes(row)]
        like = like or (synchronous if len(synchronous) == 1 else [])
        for other, result in results:
            if like and other.label == like[0].label:
                found[row.label, result["seed"]] = result["val_loss"]
    return found


def _at(row: Row, rate: float, momentum: float) -> Row:
    outer = {"outer_optimizer": {"lr": rate, "momentum": momentum}}
    return replace(row, overrides={**row.overrides, **outer})


@dataclass(frozen=True)
class Simulation:
    """A function from (row, seed, short) to figures by name; with one seed, there is no spread."""

    figures_of: Callable[[Row, int, bool], Mapping[str, float]]
    full_and_short_minutes: Minutes = (0.1, 0.1)
    seeds: tuple[int, ...] = (0,)
    kind = "simulation"

    def minutes(self, rows: Sequence[Row], run: Run) -> float:
        """Return the declared minutes."""
        return self.full_and_short_minutes[run.short]

    def measure(self, rows: Sequence[Row], run: Run) -> Samples:
        """Call the function for every row and seed."""
        samples: Samples = {}
        for row in rows:
            of_seeds = [self.figures_of(row, seed, run.short) for seed in self.seeds]
            samples[row.label] = {key: [f[key] for f in of_seeds] for key in of_seeds[0]}
        return samples


@dataclass(frozen=True)
class Lines:
    """Real processes, a cluster each, on throttled lines, as `dsx bench e2e` runs presets.

    `ratio`: seconds of an all-reduce over those of a step; `shape` is LAYERS,HIDDEN,LENGTH,BATCH.
    A row's H is its overrides' `schedule.interval`, else the planner's for all. Figures, a sample
    per block of `rounds` rounds: utilization, tokens_per_second, speedup over data parallel, of
    presets overlap (the share of the transfers in which training went on); and of the whole run,
    the same in every sample: payload_bytes, wire_bytes, loss, of presets step_seconds,
    transfer_seconds (of a period), and computed_overlap, what their ratio says for that H.
    `shares_cores` lets more clusters run than there are cores.
    """

    ratio: float
    shape: str
    full_and_short_minutes: Minutes
    blocks: int = 3
    short_blocks: int = 2
    num_clusters: int = 2
    margin: float = 1.15
    latency_milliseconds: float = 0.0
    rounds: int = 1
    shares_cores: bool = False
    kind = "line"

    def minutes(self, rows: Sequence[Row], run: Run) -> float:
        """Return the declared minutes."""
        return self.full_and_short_minutes[run.short]

    def measure(self, rows: Sequence[Row], run: Run) -> Samples:
        """Measure data parallel and every row; errors as of `dsx bench e2e`."""
        from dsx.bench.paper.lines import measure_lines

        blocks = self.short_blocks if run.short else self.blocks
        return measure_lines(self, rows, run.data, run.kept.with_suffix(".lines"), blocks)


@dataclass(frozen=True)
class Several:
    """Figures of one table that are measured in different ways."""

    parts: tuple[Measure, ...]

    @property
    def kind(self) -> str:
        """Return the words of its parts."""
        return ", ".join(part.kind for part in self.parts)

    @property
    def full_and_short_minutes(self) -> Minutes:
        """Return the sums of its parts."""
        full, short = zip(*(part.full_and_short_minutes for part in self.parts), strict=True)
        return sum(full), sum(short)

    def minutes(self, rows: Sequence[Row], run: Run) -> float:
        """Return the sum of its parts."""
        return sum(part.minutes(rows, run) for part in self.parts)

    def measure(self, rows: Sequence[Row], run: Run) -> Samples:
        """Return every part's figures."""
        samples: Samples = {row.label: {} for row in rows}
        for part in self.parts:
            for label, figures in part.measure(rows, run).items():
                samples[label] |= figures
        return samples
