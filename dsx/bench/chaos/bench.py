"""`dsx bench chaos`: a run with faults, what it comes to, and the same training without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsx.bench.chaos.check import Verdict, check
from dsx.bench.chaos.faults import KINDS, LOSSES, Fault, Kind, draw
from dsx.bench.chaos.job import EngineName, Preset
from dsx.bench.chaos.left_out import samples_skipped
from dsx.bench.chaos.logs import Window
from dsx.bench.chaos.run import clusters_of
from dsx.bench.chaos.served import SERVED, require_served
from dsx.core.checks import require_choice
from dsx.plan.published.scenario import require_number

_MOST_CLUSTERS, _MOST_RANKS, _MOST_EVENTS = 16, 8, 100_000


@dataclass(frozen=True)
class Options:
    """What is asked for; `longest_pause` of a cluster or its line, in seconds.

    `suspect_seconds` is the run's `link.suspect_seconds`. A pause is to be shorter than it.
    `zero_stage` is for DeepSpeed alone; None is 1.
    """

    directory: Path
    preset: str = "streaming"
    num_clusters: int = 4
    num_ranks: int = 2
    num_events: int = 40
    seed: int = 0
    kinds: Sequence[Kind] = KINDS
    step_seconds: float = 0.03
    suspect_seconds: float = 8.0
    longest_pause: float = 2.0
    undisturbed: bool = True
    comes_back: bool = True
    engine: EngineName = "torch"
    zero_stage: int | None = None

    def __post_init__(self) -> None:
        require_choice("--engine", self.engine, EngineName)
        require_choice("--preset", self.preset, Preset)
        for kind in self.kinds:
            require_choice("--kinds", kind, Kind)
        require_number("--clusters", self.num_clusters, 2, _MOST_CLUSTERS)
        require_number("--ranks", self.num_ranks, 1, _MOST_RANKS)
        require_number("--events", self.num_events, 1, _MOST_EVENTS)
        require_number("--step-seconds", self.step_seconds, 0.001, 60)
        require_number("--suspect-seconds", self.suspect_seconds, 2, 600)
        require_number("--longest-pause", self.longest_pause, 0.2, self.suspect_seconds / 2)
        require_served(self.engine, self.num_ranks, self.zero_stage)
        if self.directory.exists():
            raise ValueError(
                f"--out {self.directory} is there already; name a folder that is not, in which the "
                "logs of this run can be"
            )


@dataclass(frozen=True)
class Report:
    """What was asked and drawn, and what it came to; `loss_undisturbed` after as many samples.

    Where an engine's data are not dealt, nobody is to read what a lost cluster has `given_up` and
    `skipped` (left_out.py): numbers of samples, None where others read it.
    """

    options: Options
    faults: Sequence[Fault]
    verdict: Verdict
    loss_undisturbed: float | None
    given_up: int | None = None
    skipped: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        options = {**asdict(self.options), "directory": str(self.options.directory)}
        return {
            "engine": self.options.engine,
            "options": options,
            **asdict(self.verdict),
            "samples_are_dealt": SERVED[self.options.engine].is_dealt,
            "samples_given_up": self.given_up,
            "samples_skipped": self.skipped,
            "loss_undisturbed": self.loss_undisturbed,
            "faults": [asdict(fault) for fault in self.faults],
        }


def measure(options: Options, tell: Callable[[str], None]) -> Report:
    """Run it; `tell` gets a line per fault. NoProgress where those who are left do not go on."""
    faults = draw(
        options.seed, options.num_events, options.num_clusters, options.num_ranks, options.kinds,
        options.longest_pause, options.comes_back,
    )  # fmt: skip
    windows: list[Window] = []
    served = SERVED[options.engine]
    of_step = served.samples_per_step(options.num_ranks)
    tell(f"starting {options.num_clusters} clusters of {options.num_ranks} ranks")
    with _clusters(options, options.directory / "disturbed") as clusters:
        everyone = {*clusters.alive}
        for number, fault in enumerate(faults, start=1):
            window = clusters.suffer(fault)
            windows.append(window)
            told = f"{number}/{len(faults)} {say(fault)}: {window.end - window.begin:.1f} s"
            if options.comes_back and fault.kind in LOSSES:
                told += f", back after {clusters.bring_back(fault.cluster):.1f} s"
            tell(told)
        clusters.end()
        verdict = check(clusters.logs(), windows, everyone - {*clusters.alive})
        given_up, skipped = None, None
        if not served.is_dealt:
            given_up, verdict.samples_lost = verdict.samples_lost, 0
            skipped = samples_skipped(clusters.logs(), of_step)
    loss = None
    if options.undisturbed:
        steps = round(verdict.samples / options.num_clusters / of_step)
        tell(f"the same for {steps:,} steps without a fault")
        with _clusters(options, options.directory / "undisturbed", steps) as clusters:
            clusters.finish()
            other = check(clusters.logs(), ())
            verdict.problems += [f"undisturbed: {problem}" for problem in other.problems]
            loss = other.loss
    return Report(options, faults, verdict, loss, given_up, skipped)


def say(fault: Fault) -> str:
    """Say a fault in words."""
    rank = f", rank {fault.rank}" if fault.kind == "kill_rank" else ""
    lasts = fault.kind in ("pause", "cut", "cut_one_way", "clock")
    return f"{fault.kind} of cluster {fault.cluster}{rank}" + (
        f" ({fault.seconds:+.1f} s)" if lasts else ""
    )


def _clusters(options: Options, directory: Path, last_step: int = 1_000_000) -> Any:
    return clusters_of(
        directory, options.preset, options.num_clusters, options.num_ranks, options.seed,
        options.step_seconds, options.suspect_seconds, last_step, options.engine,
        1 if options.zero_stage is None else options.zero_stage,
    )  # fmt: skip
