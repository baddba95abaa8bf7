"""What is asked of `dsx bench wall-clock`, and how many steps and which line follow from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsx.bench.e2e.job import Shape
from dsx.bench.testbed import MAX_CLUSTERS, Line
from dsx.bench.wall_clock.job import Inner
from dsx.plan.link import wire_bytes
from dsx.plan.published.scenario import require_number

DEFAULT_SHAPE = Shape(5, 128, 128, 16)
_START_SECONDS = 20.0  # of a run, before its first step and behind its last
_SCORE_SHARE = 0.04
_SLOW_SHARE = 0.06
_FEWEST_SLOW_STEPS = 8  # the first sets things up, and a pace is to be read off the rest
_TRY_SHARE = 0.1  # of the steps, for each rate
_REST_SHARE = 1.15  # of a step without communication; all-reduce on a fast line, and codes
_MULTIPLE = 16  # steps come in so many
FEWEST_STEPS = 4 * _MULTIPLE
TOKENS_PER_PARAMETER = (20, 70)
_MOST_MINUTES = 600  # a run takes less than half of them, and a runner waits 6 hours for it


@dataclass(frozen=True)
class Options:
    """What is asked for; one `rate` is taken as it is, of several the best of short runs.

    The line is that on which an all-reduce of fp32 gradients takes `ratio` times as long as a step
    computes, unless `megabits_per_second` is given. `interval` None is the preset's own H.
    """

    directory: Path
    data: Path
    minutes: float = 120.0
    shape: Shape = DEFAULT_SHAPE
    num_clusters: int = 2
    ratio: float = 100.0
    megabits_per_second: float | None = None
    interval: int | None = None
    inner: Inner = "muon"
    rates: tuple[float, ...] = (0.004, 0.008, 0.016, 0.032)
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("minutes", self.minutes, 1, _MOST_MINUTES)
        require_number("clusters", self.num_clusters, 2, MAX_CLUSTERS)
        require_number("ratio", self.ratio, 1, 10_000)
        if self.megabits_per_second is not None:
            require_number("mbit", self.megabits_per_second, 0.01, 100_000)
        if self.interval is not None:
            require_number("interval", self.interval, 1, 10_000)
        for rate in self.rates:
            require_number("rates", rate, 1e-6, 1.0)
        if len(set(self.rates)) < max(1, len(self.rates)):
            raise ValueError(f"rates={self.rates} must be one or more, each once")

    def as_json(self) -> dict[str, Any]:
        """Return what has to be the same for parts of an earlier run to count."""
        asked = asdict(self)
        del asked["directory"], asked["data"]  # of the data counts what is in it
        return {**asked, "rates": list(self.rates)}


@dataclass(frozen=True)
class Plan:
    """What is run: `step_seconds` were measured without communication, per cluster.

    `transfer_seconds` is what an all-reduce of fp32 gradients takes on the line.
    """

    step_seconds: float
    num_parameters: int
    steps: int
    try_steps: int
    slow_seconds: float
    megabits_per_second: float
    transfer_seconds: float
    tokens_per_step: int
    tokens_per_parameter: float
    epochs: float

    @property
    def ratio(self) -> float:
        """Seconds of an all-reduce over those of a step."""
        return self.transfer_seconds / self.step_seconds

    def advice(self) -> str | None:
        """Return what to change where a run would be too short or too long for its model."""
        least, most = TOKENS_PER_PARAMETER
        if least <= self.tokens_per_parameter <= most:
            return None
        which = "smaller" if self.tokens_per_parameter < least else "larger"
        return (
            f"{self.tokens_per_parameter:.3g} tokens per parameter, where {least} to {most} are "
            f"usual: take a {which} --shape, or other --minutes"
        )


def make_plan(options: Options, step_seconds: float, num_parameters: int, data_tokens: int) -> Plan:
    """Return the longest run that fits; ValueError if hardly any does."""
    tries = 2 * len(options.rates) if len(options.rates) > 1 else 0
    clusters = options.num_clusters
    sent = wire_bytes(2 * (clusters - 1) / clusters * 4 * num_parameters)
    rate = options.megabits_per_second or 8e-6 * sent / (options.ratio * step_seconds)
    Line(rate)  # ValueError now, and not when data parallel has been run
    transfer_seconds = 8e-6 * sent / rate
    least = _FEWEST_SLOW_STEPS * (transfer_seconds + _REST_SHARE * step_seconds)
    slow_seconds = max(_SLOW_SHARE * 60 * options.minutes, least)
    seconds = 60 * options.minutes * (1 - _SCORE_SHARE) - slow_seconds
    seconds -= (4 + tries) * _START_SECONDS
    most = seconds / (_REST_SHARE * step_seconds)  # of all runs but `slow`
    try_steps = max(FEWEST_STEPS, _whole(_TRY_SHARE * most / (2 + tries * _TRY_SHARE)))
    steps = _whole((most - tries * try_steps) / 2)
    if steps < FEWEST_STEPS:
        raise ValueError(
            f"minutes={options.minutes:g} leave {max(0, steps)} steps of {step_seconds:.2g} s to "
            f"each run, and {FEWEST_STEPS} are the fewest, behind {slow_seconds / 60:.2g} minutes "
            f"of data parallel on the slow line, where an all-reduce takes {transfer_seconds:.3g} "
            "s; give more minutes, one of the --rates, a smaller --ratio or --shape, or more --mbit"
        )
    tokens = clusters * options.shape.tokens_per_step
    return Plan(
        step_seconds=step_seconds,
        num_parameters=num_parameters,
        steps=steps,
        try_steps=try_steps,
        slow_seconds=slow_seconds,
        megabits_per_second=rate,
        transfer_seconds=transfer_seconds,
        tokens_per_step=tokens,
        tokens_per_parameter=steps * tokens / num_parameters,
        epochs=steps * tokens / data_tokens,
    )


def _whole(steps: float) -> int:
    return int(steps // _MULTIPLE) * _MULTIPLE


def snapshot_steps(steps: int) -> list[int]:
    """Return the steps to score, the last one left out: each a quarter behind the one before.

    From a sixteenth of the run on they come every sixteenth: most of its time is there.
    """
    chosen = {steps * i // 16 for i in range(1, 16)}
    step = 1.0
    while step < steps / 16:
        chosen.add(round(step))
        step *= 1.25
    return sorted(chosen - {0, steps})
