"""Runs in processes of their own, each finished one kept in a file and not run again.

It is kept under all that its figures come from: the study and the task, dsx's version, the function
that trains, the method as resolved, defaults and all, and the checksum of the corpus.
"""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import dsx
from dsx.bench.convergence.task import BASELINE, OUTER_BASELINE, Study, Task, overrides
from dsx.config.schema import resolve_method
from dsx.core.progress import SOON, Progress, as_count
from dsx.data import read_summary

FORMAT = 5  # of a kept result: one of another format is run again
Result = dict[str, Any]
RunTask = Callable[[Any, Task], Result]  # of a study, a frozen dataclass, and a task


def run_all(
    runs: Sequence[tuple[Any, Task]], jobs: int, kept: Path, run_task: RunTask
) -> list[Result]:
    """Return the results of (study, task), from `kept` where they are there; the rest in processes.

    `run_task` is a function of a module, which processes can import. Lines say how many are done.
    """
    done = read_kept(kept)
    missing = {name: run for run in runs if (name := identity(*run, run_task)) not in done}
    if missing:
        progress = Progress("runs", len(missing), True, first_seconds=SOON, shown=as_count)
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, prepare_worker) as pool, kept.open("a") as file:
            todo = [(name, *run) for name, run in missing.items()]
            for name, result in pool.imap_unordered(Runner(run_task), todo):
                done[name] = result
                study, key, source = json.loads(name)
                of = {"study": study, "key": key, "source": source}
                entry = {"format": FORMAT, **of, "result": result}
                file.write(json.dumps(entry) + "\n")
                file.flush()
                progress.moved(1)
    return [dict(done[identity(*run, run_task)]) for run in runs]


def read_kept(kept: Path) -> dict[str, Result]:
    """Return what is kept, without a line that an interruption has cut short."""
    if not kept.exists():
        return {}
    text = kept.read_text()
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    if not text.endswith("\n"):
        kept.write_text("".join(lines))
    entries = [e for e in map(json.loads, lines) if e.get("format") == FORMAT]
    return {_name(e["study"], e["key"], e["source"]): e["result"] for e in entries}


def identity(study: Any, task: Task, run_task: RunTask) -> str:
    """Return what a run is kept under: without fields of the study that are as by default."""
    return _name(asdict(study), task.key, _source(study, task, run_task))


def _source(study: Any, task: Task, run_task: RunTask) -> dict[str, Any]:
    """Return what a result comes from beside what was asked; of no `Study`, not the method."""
    source: dict[str, Any] = {
        "dsx": dsx.__version__,
        "run_task": f"{run_task.__module__}:{run_task.__qualname__}",
    }
    if isinstance(study, Study):
        source["corpus"] = _checksum(study)
        if task.preset != BASELINE:
            preset = task.preset.partition("+")[0]
            preset = "diloco" if preset == OUTER_BASELINE else preset
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", dsx.SettingWarning)
                _, axes = resolve_method(preset, overrides(study, task), study.num_clusters)
            source["method"] = axes
    return source


def _checksum(study: Study) -> str | None:
    """Return that of the corpus; None for what reads none, and where there is none yet."""
    if study.problem == "images" or not (Path(study.data) / "train.bin").exists():
        return None
    return read_summary(study.data).content_digest


def _name(study: dict[str, Any], key: str, source: dict[str, Any]) -> str:
    usual = {field.name: field.default for field in fields(Study)}
    said = {k: v for k, v in study.items() if k not in usual or v != usual[k]}
    return json.dumps([said, key, source], sort_keys=True)


def prepare_worker() -> None:
    """Set up a process of the pool."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", dsx.SettingWarning)  # the grid goes beyond what is stable


@dataclass(frozen=True)
class Runner:
    """What a worker process calls."""

    run_task: RunTask

    def __call__(self, run: tuple[str, Any, Task]) -> tuple[str, Result]:
        """Run a task; its identity comes back with its result, which may overtake others."""
        name, study, task = run
        return name, self.run_task(study, task)
