"""`dsx bench wall-clock`: one GPT, the same batches and steps, three ways, to the end.

    fast         DeepSpeed data parallel over all clusters, no slow line between them
    recommended  the preset, DeepSpeed inside each cluster, on the slow line
    slow         DeepSpeed data parallel on the slow line, for as long as the plan has for it

`slow` does what `fast` does, step by step, so where it would have ended is known without waiting.
The inner rate is chosen for data parallel and for the preset alike, by as many short runs; those of
the preset are on the slow line. Every finished part is kept, and the same command goes on.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import dsx
from dsx.bench.e2e.bench import open_runner
from dsx.bench.e2e.job import Mode
from dsx.bench.e2e.run import Measured, Runner
from dsx.bench.testbed import Line
from dsx.bench.wall_clock.job import TrainingJob, build_gpt, deepspeed_json
from dsx.bench.wall_clock.plan import Options, Plan, make_plan, snapshot_steps
from dsx.bench.wall_clock.score import Part, score
from dsx.config.schema import preset
from dsx.core.types import ParameterShape
from dsx.core.units import format_bytes
from dsx.data import read_summary
from dsx.plan.traffic import one_rank

_WORKER = "dsx.bench.wall_clock.worker"
_TIMED_STEPS, _NOT_TIMED = 60, 20
_DEADLINE_SECONDS = 12 * 3600.0
_TELL_SECONDS = 30.0
MODES: dict[str, Mode] = {"fast": "data_parallel", "recommended": "dsx", "slow": "data_parallel"}


@dataclass(frozen=True)
class Report:
    """What was planned and reached; `tries` are the short runs by which rates were chosen."""

    plan: Plan
    tries: tuple[Part, ...]
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "plan": {**asdict(self.plan), "ratio": self.plan.ratio},
            "tries": [part.as_json() for part in self.tries],
            "parts": [part.as_json() for part in self.parts],
        }


def measure(options: Options, tell: Callable[[str], None]) -> Report:
    """Run what is not kept yet; `tell` gets a line per part, and one every half a minute.

    ValueError for inputs, TestbedUnavailable if this host has no slow line, RunFailed otherwise.
    """
    with open_runner(options) as runner:
        bench = Bench(options, runner, tell)
        plan = bench.plan()
        tell(_say(plan, options))
        tries, parts, rates = list[Part](), list[Part](), dict[str, float]()
        for name, mode in MODES.items():
            if mode not in rates:
                tried = bench.tries(name, plan)
                rates[mode] = best_rate(tried) if tried else options.rates[0]
                tries += tried
            most = plan.slow_seconds if name == "slow" else None
            line = None if name == "fast" else Line(plan.megabits_per_second)
            parts.append(bench.part(name, mode, rates[mode], plan.steps, line, most))
    return Report(plan, tuple(tries), tuple(parts))


class Bench:
    """Runs parts, and keeps each that is finished."""

    def __init__(self, options: Options, runner: Runner, tell: Callable[[str], None]) -> None:
        self._options, self._runner, self._tell = options, runner, tell
        self._dataset = read_summary(options.data)
        self._shape = replace(options.shape, vocab_size=self._dataset.vocab_size)
        self._asked = {
            **options.as_json(), "content_digest": self._dataset.content_digest, **surroundings()
        }  # fmt: skip

    def plan(self) -> Plan:
        """Return the plan that is kept, or time some steps and keep one; ValueError for another."""
        kept = self._options.directory / "plan.json"
        if kept.exists():
            found = json.loads(kept.read_text())
            others = [
                f"{key} ({found['asked'].get(key)} there, {value} now)"
                for key, value in self._asked.items() if found["asked"].get(key) != value
            ]  # fmt: skip
            if others:
                raise ValueError(
                    f"{self._options.directory} holds a run with other {', '.join(others)}; go on "
                    "with it where all is the same, or name another --out"
                )
            return Plan(**found["plan"])
        self._check_method()
        job = self._job("timed", "ceiling", self._options.rates[0], _TIMED_STEPS)
        measured = self._run(job, None)
        steps = [r["steps"][n]["seconds"] - r["steps"][n - 1]["seconds"]
                 for r in measured.clusters for n in range(_NOT_TIMED, _TIMED_STEPS)]  # fmt: skip
        numel = build_gpt(self._shape, 0).num_parameters()
        tokens = self._dataset.train.num_tokens
        plan = make_plan(self._options, statistics.median(steps), numel, tokens)
        _write(kept, {"asked": self._asked, "plan": asdict(plan)})
        return plan

    def tries(self, name: str, plan: Plan) -> list[Part]:
        """Return a short run per rate, of what `name` does; none where there is no choice."""
        rates = self._options.rates
        line = None if name == "fast" else Line(plan.megabits_per_second)
        return [
            self.part(f"{name}_{rate}", MODES[name], rate, plan.try_steps, line)
            for rate in (rates if len(rates) > 1 else ())
        ]

    def part(
        self, name: str, mode: Mode, rate: float, steps: int, line: Line | None,
        most_seconds: float | None = None,
    ) -> Part:  # fmt: skip
        """Return a run: as it is kept, or of now."""
        kept = self._options.directory / f"{name}.json"
        if kept.exists():
            part = Part.read(json.loads(kept.read_text()))
        else:
            job = self._job(name, mode, rate, steps, most_seconds)
            rate_of_line = None if line is None else line.megabits_per_second
            part = score(name, job, self._run(job, line), rate_of_line)
            _write(kept, part.as_json())
        last = part.last
        self._tell(
            f"{name}: rate {part.rate:g}, {part.steps:,} of {part.planned_steps:,} steps in "
            f"{last.seconds / 60:.1f} min, {format_bytes(last.wire_bytes)} sent, "
            f"validation loss {last.loss:.4f}"
        )
        return part

    def _choices(self) -> dict[str, Any]:
        interval = self._options.interval
        return {} if interval is None else {"schedule": {"interval": interval}}

    def _check_method(self) -> None:
        """Raise ValueError now where the preset would, when data parallel has been run."""
        clusters = self._options.num_clusters
        named = build_gpt(self._shape, 0).named_parameters()
        parameters = [ParameterShape(name, tuple(p.shape)) for name, p in named]
        method = preset("recommended", clusters, **self._choices())
        (fragments,) = one_rank(method.fragments, parameters)
        method.validate(clusters, num_fragments=len(fragments))

    def _job(
        self, name: str, mode: Mode, rate: float, steps: int, most_seconds: float | None = None
    ) -> TrainingJob:
        config = deepspeed_json(self._shape.batch_size, steps)
        if mode == "dsx":
            clusters = self._runner.clusters_block()
            config["dsx"] = {"preset": "recommended", **self._choices(), "clusters": clusters}
            config["dsx"]["link"] = {"security": "none"}
        options = self._options
        return TrainingJob(
            mode, config, self._shape, steps, steps, options.num_clusters,
            str(options.data.resolve()), str(options.directory.resolve() / name),
            _DEADLINE_SECONDS, 0.0, options.seed, rate=rate, inner=options.inner,
            snapshot_steps=snapshot_steps(steps) if name in MODES else [],
            most_seconds=most_seconds,
        )  # fmt: skip

    def _run(self, job: TrainingJob, line: Line | None) -> Measured:
        told = time.monotonic()

        def watch(directory: Path) -> None:
            nonlocal told
            found = directory / "progress_0.json"
            if time.monotonic() - told > _TELL_SECONDS and found.exists():
                told = time.monotonic()
                self._tell(say_progress(directory.name, json.loads(found.read_text()), job))

        self._runner.watch = watch
        return self._runner.run(job, line, _WORKER)


def best_rate(tries: list[Part]) -> float:
    """Return the rate with the least loss at the end; ValueError if all runs have diverged."""
    finite = [part for part in tries if math.isfinite(part.last.loss)]
    if not finite:
        raise ValueError(
            f"{', '.join(part.name for part in tries)}: every one has diverged; try smaller "
            "--rates, with another --out"
        )
    return min(finite, key=lambda part: part.last.loss).rate


def surroundings() -> dict[str, Any]:
    """Return of what a run is made, and where: parts of others are not to stand beside it."""
    versions: dict[str, Any] = {"dsx": dsx.__version__}
    for package in ("torch", "deepspeed"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a run says so
            versions[package] = None
    cores = len(os.sched_getaffinity(0))
    return {**versions, "host": os.uname().nodename, "cores": cores}


def say_progress(name: str, told: dict[str, float], job: TrainingJob) -> str:
    """Say in a line how far a run is."""
    step, seconds = int(told["step"]), told["seconds"]
    left = (job.steps - step) * seconds / step
    if job.most_seconds is not None:
        left = min(left, max(0.0, job.most_seconds - seconds))
    return (
        f"  {name}: step {step:,} of {job.steps:,} after {seconds / 60:.1f} min, training loss "
        f"{told['loss']:.3f}, {format_bytes(told['wire_bytes'])} sent; {left / 60:.1f} min left"
    )


def _say(plan: Plan, options: Options) -> str:
    advice = plan.advice()
    return (
        f"{plan.num_parameters:,} parameters ({options.shape}), {plan.steps:,} steps of "
        f"{plan.tokens_per_step:,} tokens: {plan.tokens_per_parameter:.3g} tokens per parameter, "
        f"{plan.epochs:.3g} epochs\n"
        f"a step computes {1000 * plan.step_seconds:.0f} ms; on a line of "
        f"{plan.megabits_per_second:.3g} Mbit/s an all-reduce of fp32 gradients takes "
        f"{plan.transfer_seconds:.3g} s, {plan.ratio:.3g} times as long"
        + (f"\n{advice}" if advice else "")
    )


def _write(path: Path, values: dict[str, Any]) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(values, indent=2) + "\n")
    path.with_suffix(".tmp").rename(path)
