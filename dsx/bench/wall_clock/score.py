"""Reads a run's records and weights: what it has reached, when, after how many bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dsx.bench.e2e.run import Measured
from dsx.bench.wall_clock.job import TrainingJob, build_gpt
from dsx.data import TokenWindows

_WINDOWS, _BATCH = 512, 64
_FEWEST_FOR_DECILES = 3


@dataclass(frozen=True)
class Point:
    """The averaged model after so many steps: of the slowest cluster, and the one that sent most.

    The last point of a run is the finished model, with what finishing took. The loss of a model
    that is not finite is not either.
    """

    step: int
    seconds: float
    wire_bytes: int
    loss: float


@dataclass(frozen=True)
class Part:
    """One run. Seconds are per step, of cluster 0: means, of the forward also its deciles 1 and 9.

    The deciles are None of fewer than 3 steps. `cpu_seconds` are those of the training thread.
    `snapshot_seconds` are what writing weights has added to the points' seconds, in all.
    `wait_seconds` are in all, by dsx's own count; None where there is none, as `payload_bytes`,
    which have the finished model's average in them as the points' bytes do.
    """

    name: str
    mode: str
    rate: float
    planned_steps: int
    steps: int
    megabits_per_second: float | None
    curve: tuple[Point, ...]
    step_seconds: float
    forward_seconds: float
    forward_deciles: tuple[float, float] | None
    cpu_seconds: float
    snapshot_seconds: float
    wait_seconds: float | None
    payload_bytes: int | None

    @property
    def last(self) -> Point:
        """The end of the run."""
        return self.curve[-1]

    def as_json(self) -> dict[str, Any]:
        """Return plain values; JSON has no word for a loss that is not finite, so it is None."""
        values = asdict(self)
        for point in values["curve"]:
            point["loss"] = point["loss"] if math.isfinite(point["loss"]) else None
        return values

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Part:
        """Read what `as_json` has returned."""
        own: dict[str, Any] = dict(values)
        own["curve"] = tuple(_read_point(point) for point in values["curve"])
        deciles = values["forward_deciles"]
        own["forward_deciles"] = None if deciles is None else tuple(deciles)
        return cls(**own)


def score(
    name: str, job: TrainingJob, measured: Measured, megabits_per_second: float | None
) -> Part:
    """Return what a finished run has come to; its weights are removed."""
    records = measured.clusters
    reached = min(len(r["steps"]) for r in records)
    scorer = Scorer(job)
    curve = [
        Point(step, *_slowest_and_most([r["steps"][step - 1] for r in records]), scorer.loss(step))
        for step in job.snapshot_steps
        if step < reached
    ]
    ended = _slowest_and_most([r["end"] for r in records])
    has_diverged = any(r["has_diverged"] for r in records)
    curve.append(Point(reached, *ended, math.nan if has_diverged else scorer.loss("end")))
    ends, is_dsx = [r["end"] for r in records], job.mode == "dsx"
    forward = _steps_of(records[0], "forward_seconds")
    part = Part(
        name=name,
        mode=job.mode,
        rate=job.rate,
        planned_steps=job.steps,
        steps=reached,
        megabits_per_second=megabits_per_second,
        curve=tuple(curve),
        step_seconds=statistics.fmean(_steps_of(records[0], "seconds")),
        forward_seconds=statistics.fmean(forward),
        forward_deciles=_deciles(forward),
        cpu_seconds=statistics.fmean(_steps_of(records[0], "cpu_seconds")),
        snapshot_seconds=max(r["snapshot_seconds"] for r in records),
        wait_seconds=max(end["wait_seconds"] for end in ends) if is_dsx else None,
        payload_bytes=max(round(end["bytes_sent"]) for end in ends) if is_dsx else None,
    )
    for path in Path(job.directory).glob("weights_*"):
        path.unlink()
    return part


class Scorer:
    """Losses of averaged models on windows spread over what is held out."""

    def __init__(self, job: TrainingJob) -> None:
        self._directory = Path(job.directory)
        self._model = build_gpt(job.shape, job.seed).eval()
        held_out = TokenWindows(f"{job.data}/validation", job.shape.sequence_length)
        count = min(_WINDOWS, len(held_out))
        rows = [held_out[i * len(held_out) // count] for i in range(count)]
        self._batches = torch.stack(rows).split(_BATCH)

    @torch.no_grad()
    def loss(self, name: str | int) -> float:
        """Return the loss of the mean of all clusters' weights at a step, nats per token."""
        found = sorted(self._directory.glob(f"weights_{name}_*"))
        self._model.load_state_dict(mean_of([load_file(path) for path in found]))
        total = sum(
            len(rows) * self._model(rows[:, :-1], rows[:, 1:]).item() for rows in self._batches
        )
        return total / sum(map(len, self._batches))


def mean_of(weights: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean by name."""
    return {name: torch.stack([w[name] for w in weights]).mean(0) for name in weights[0]}


def _read_point(values: Mapping[str, Any]) -> Point:
    loss = values["loss"]
    return Point(values["step"], values["seconds"], values["wire_bytes"],
                 math.nan if loss is None else loss)  # fmt: skip


def _slowest_and_most(steps: Sequence[Mapping[str, float]]) -> tuple[float, int]:
    return max(s["seconds"] for s in steps), round(max(s["wire_bytes"] for s in steps))


def _steps_of(record: Mapping[str, Any], key: str) -> list[float]:
    """Return the differences of sums; the first step, which also sets things up, is left out.

    It is all there is of a run that has taken no other.
    """
    sums = [step[key] for step in record["steps"]]
    return [after - before for before, after in zip(sums, sums[1:], strict=False)] or sums


def _deciles(seconds: Sequence[float]) -> tuple[float, float] | None:
    if len(seconds) < _FEWEST_FOR_DECILES:
        return None
    found = statistics.quantiles(seconds, n=10, method="inclusive")  # never outside what was seen
    return found[0], found[-1]
