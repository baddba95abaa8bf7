"""What a dry run is asked, and the line, the step and the disk that its seconds are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsx.core.units import format_seconds
from dsx.plan.given import BOUNDS
from dsx.plan.link import Link
from dsx.plan.model_files import ModelFiles
from dsx.plan.published.scenario import require_number
from dsx.plan.step_time import USUAL_MFU, require_gpu, seconds_of_step

GBPS, LATENCY_MS, GPU = 1.0, 20.0, "a800"
DISK_MB_S = 500.0  # each of eight ranks that share an NVMe disk of 4 GB/s
_LEAST_STEP = 1e-6


@dataclass(frozen=True)
class Asked:
    """What the command was given; the rates that are None are assumed (`rates_of`)."""

    source: Path
    model: Path | None = None
    clusters: int | None = None
    ranks: int | None = None
    build: Sequence[int] | None = None
    step_seconds: float | None = None
    gbps: float | None = None
    latency_ms: float | None = None
    disk_mb_s: float | None = None
    gpu: str | None = None
    mfu: float | None = None


@dataclass(frozen=True)
class Rates:
    """`assumed`: of each that was not given, what is taken, and the words that say so."""

    step_seconds: float
    gbps: float
    latency_ms: float
    disk_mb_s: float
    assumed: dict[str, tuple[float, str]]

    @property
    def link(self) -> Link:
        """A cluster's line."""
        return Link(self.gbps * 1e9, self.latency_ms / 1e3)


def require_rates(asked: Asked) -> None:
    """Raise ValueError for a number out of bounds, and for one that would be ignored."""
    for name in ("step_seconds", "mfu", "gbps", "latency_ms"):
        value: float | None = getattr(asked, name)
        if value is not None:
            require_number(f"--{name.replace('_', '-')}", value, *BOUNDS[name])
    if asked.gpu is not None:
        require_gpu(asked.gpu)
    for name in ("gpu", "mfu"):
        if getattr(asked, name) is not None and asked.step_seconds is not None:
            raise ValueError(
                f"--{name} estimates a step's seconds, and --step-seconds gives them: leave one out"
            )


def rates_of(asked: Asked, files: ModelFiles, active_parameters: int) -> Rates:
    """Return what was asked for, and in the place of what was not what is usual."""
    assumed: dict[str, tuple[float, str]] = {}

    def take(name: str, given: float | None, usual: float, words: str) -> float:
        if given is not None:
            return given
        assumed[name] = usual, f"{words} (--{name.replace('_', '-')})"
        return usual

    gbps = take("gbps", asked.gbps, GBPS, f"{GBPS:g} Gbit/s for each cluster")
    latency = take("latency_ms", asked.latency_ms, LATENCY_MS, f"{LATENCY_MS:g} ms one way")
    step = asked.step_seconds
    if step is None:
        step, words = _estimated(asked, files, active_parameters)
        assumed["step_seconds"] = step, words
    disk = take(
        "disk_mb_s", asked.disk_mb_s, DISK_MB_S, f"{DISK_MB_S:g} MB/s to the disk from each rank"
    )
    return Rates(step, gbps, latency, disk, assumed)


def _estimated(asked: Asked, files: ModelFiles, parameters: int) -> tuple[float, str]:
    """Return a step's seconds for its arithmetic, and how they come about."""
    gpu, mfu = asked.gpu or GPU, asked.mfu or USUAL_MFU
    batch, cluster = files.batch, files.cluster
    # engines have one micro-batch a step where no more are told
    sequences = batch.sequences_per_step or batch.micro_batch * cluster.data
    tokens = sequences * batch.sequence
    seconds = max(_LEAST_STEP, seconds_of_step(parameters, tokens, cluster.ranks, gpu, mfu))
    return seconds, (
        f"{format_seconds(seconds)} per inner step, 6 x {parameters:,} parameters x {tokens:,} "
        f"tokens at {100 * mfu:g} % of {cluster.ranks} {gpu.upper()} (--step-seconds, or --gpu and "
        "--mfu)"
    )
