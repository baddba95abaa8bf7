"""Runs that go wrong on purpose, beside sound ones: what the guard's figures are in each.

What is wrong is a preset's own setting (too much gain, too late), or one cluster of them: its data
is noise, its inner rate is twenty times the others', or its steps go the other way.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import dsx
from dsx.bench.convergence.guard import FIGURES, GuardRecord
from dsx.bench.convergence.inner import make_optimizers, take_step
from dsx.bench.convergence.problems import PROBLEMS
from dsx.bench.convergence.runs import evaluate
from dsx.bench.convergence.task import Study, Task, inner_rate, overrides
from dsx.data import ClusterBatches
from dsx.method.alarms import FEWEST, WEIGHT

Wrong = Literal["", "noise", "rate", "sign"]  # of the last cluster
_TOO_MUCH = 20.0


@dataclass(frozen=True)
class Case:
    """A run: a preset with choices, and what is wrong with one cluster, if anything is."""

    name: str
    preset: str
    choices: Mapping[str, Any] | None = None
    wrong: Wrong = ""
    non_iid: bool = False
    steps_down: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether nothing should be warned of."""
        return self.name.startswith("sound")


def _rule(lr: float, momentum: float) -> dict[str, Any]:
    return {"type": "nesterov", "lr": lr, "momentum": momentum}


_LATE = {"type": "one_step"}
SOUND = (
    "local_sgd", "slowmo", "diloco", "opendiloco", "streaming_diloco", "cocodc", "diloco_delayed",
    "eager", "eager_2", "eager_fp4", "dilocox", "co2", "overlap_local_sgd", "recommended",
)  # fmt: skip
_WARNED = (
    *(Case(f"sound: {name}", name) for name in SOUND),
    Case("gain: diloco, lr 2, mu 0.5", "diloco", {"outer_optimizer": _rule(2.0, 0.5)}),
    Case("gain: diloco, lr 1, mu 0.9", "diloco", {"outer_optimizer": _rule(1.0, 0.9)}),
    Case("gain: diloco, lr 2, mu 0.9", "diloco", {"outer_optimizer": _rule(2.0, 0.9)}),
    Case("gain: diloco, lr 8, mu 0.9", "diloco", {"outer_optimizer": _rule(8.0, 0.9)}),
    Case("gain: recommended, lr 2", "recommended", {"outer_optimizer": _rule(2.0, 0.5)}),
    Case("gain: recommended, lr 8", "recommended", {"outer_optimizer": _rule(8.0, 0.5)}),
    Case("gain: recommended, mu 0.8", "recommended", {"outer_optimizer": _rule(1.0, 0.8)}),
    Case("gain: recommended, mu 0.9", "recommended", {"outer_optimizer": _rule(1.0, 0.9)}),
    Case("late: diloco_delayed, mu 0.9", "diloco_delayed",
         {"outer_optimizer": _rule(0.7, 0.9), "delay": _LATE}),
    Case("late: diloco_delayed, lr 1, mu 0.9", "diloco_delayed",
         {"outer_optimizer": _rule(1.0, 0.9), "delay": _LATE}),
    *(Case(f"{wrong}: {name}", name, None, wrong)
      for name in ("diloco", "recommended") for wrong in ("noise", "rate", "sign")),
    *(Case(f"non-IID: {name}", name, None, "", True) for name in ("diloco", "recommended")),
)  # fmt: skip


CASES = (
    *_WARNED,
    *(
        replace(case, name=f"{case.name}, step_down", steps_down=True)
        for case in _WARNED
        if case.name.startswith(("gain", "late"))
    ),
)


def run_case(study: Study, case: Case, seed: int = 0) -> dict[str, Any]:
    """Train a case and return its figures, loss and settings."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    if case.non_iid:
        study = replace(study, shards="contiguous")
    problem = PROBLEMS[study.problem]
    model = problem.make_model(study, seed)
    train, held_out = problem.read(study)
    chosen = torch.stack([held_out[i] for i in range(min(64, len(held_out)))])
    task = Task(case.preset, seed, choices=case.choices)
    axes = overrides(study, task)
    method = dsx.preset(case.preset, study.num_clusters, **axes)
    if case.steps_down:
        method = replace(method, guard="step_down")
    models = [copy.deepcopy(model) for _ in range(study.num_clusters)]
    optimizers = [make_optimizers(m, study) for m in models]
    record = GuardRecord()
    clusters = dsx.SimulatedClusters(
        models, optimizers, method, on_sync=lambda m, event: None if m else record.note(event)
    )
    batches = [
        ClusterBatches(
            train, study.batch_size, cluster_id=m, num_clusters=study.num_clusters, rank=0,
            world_size=1, seed=seed, shards=study.shards,
        )
        for m in range(study.num_clusters)
    ]  # fmt: skip
    last = study.num_clusters - 1
    for step in range(1, study.num_steps + 1):
        for m, own in enumerate(models):
            rows, lr = next(batches[m]), inner_rate(study, step)
            if m == last and case.wrong == "noise":
                rows = torch.randint_like(rows, 256)
            if m == last and case.wrong == "rate":
                lr *= _TOO_MUCH
            before = [p.detach().clone() for p in own.parameters()] if case.wrong == "sign" else []
            take_step(own, optimizers[m], problem.inputs_and_targets(study, rows), lr)
            if m == last and case.wrong == "sign":
                with torch.no_grad():
                    for p, old in zip(own.parameters(), before, strict=True):
                        p.copy_(2 * old - p)
        clusters.step()
    clusters.finish()
    with clusters.averaged() as finished:
        loss, _ = evaluate(finished, [problem.inputs_and_targets(study, chosen)])
    return {
        "case": case.name, "val_loss": loss, "guard": record.summary(), "rounds": record.rows,
        "settings": axes, "seconds": time.perf_counter() - started,
    }  # fmt: skip


def line_of(row: Mapping[str, Any]) -> str:
    """Return a line of the table in docs/methods/guard.md: figures are averages as judged."""
    cells = [f"{row['case']}", f"{row['val_loss']:.2f}"]
    judged = averages_of(row["rounds"])
    for name in FIGURES:
        low, high = judged.get(name, (None, None))
        cells.append("-" if low is None or high is None else f"{low:.2f} to {high:.2f}")
    alarms = row["guard"]["alarms"]
    rungs = Counter(row["rounds"][-1].get("guard_rungs", ()))
    cells.append(_counts(alarms) + (f"; down: {_counts(rungs)}" if rungs else ""))
    return f"| {' | '.join(cells)} |"


def _counts(of: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in of.items()) or "none"


def averages_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest average that was judged, by figure."""
    averages: dict[tuple[int, str], tuple[float, int]] = {}
    judged: dict[str, list[float]] = {}
    for row in rounds:
        for name in FIGURES:
            if name not in row:
                continue
            before, count = averages.get((row["fragment"], name), (row[name], 0))
            average = (1 - WEIGHT) * before + WEIGHT * row[name]
            averages[row["fragment"], name] = average, count + 1
            if count + 1 >= FEWEST:
                judged.setdefault(name, []).append(average)
    return {name: (min(values), max(values)) for name, values in judged.items()}
