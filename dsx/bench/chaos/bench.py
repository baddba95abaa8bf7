"""`dsx bench chaos`: a run with faults, what it comes to, and the same training without any."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsx.bench.chaos.check import check
from dsx.bench.chaos.costs import costs_by_kind
from dsx.bench.chaos.disks import may_mount
from dsx.bench.chaos.faults import (
    KINDS,
    Fault,
    Kind,
    comes_back_at_once,
    draw,
    require_possible,
)
from dsx.bench.chaos.forking import NoProgress
from dsx.bench.chaos.in_vain import steps_in_vain
from dsx.bench.chaos.inflicting import Inflictor
from dsx.bench.chaos.job import PLANS, EngineName, Preset
from dsx.bench.chaos.left_out import samples_skipped
from dsx.bench.chaos.logs import Window
from dsx.bench.chaos.pauses import pauses_of
from dsx.bench.chaos.run import Clusters, clusters_of
from dsx.bench.chaos.served import SERVED, require_served
from dsx.bench.chaos.verdict import Verdict
from dsx.core.checks import require_choice
from dsx.plan.published.scenario import require_number

_MOST_CLUSTERS, _MOST_RANKS, _MOST_EVENTS = 16, 8, 100_000
_UNPACED_SECONDS = 0.001  # of a step, where no fault has to be aimed at one


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
        require_possible(self.kinds, self.num_clusters, self.comes_back)
        if "full_disk" in self.kinds and not may_mount():
            raise ValueError(
                "--kinds full_disk: this process may not mount a disk (as root it may); leave it "
                "out"
            )
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
class Course:
    """When each fault was and the run ended: `seconds` from `began`, when all trained.

    `steps` are inner ones of all clusters, `in_vain` those that are in no mean (in_vain.py);
    `pauses` of each fault as pauses.py has them.
    """

    windows: Sequence[Window]
    began: float
    seconds: float
    steps: int
    in_vain: float
    pauses: Sequence[float | None]
    last_step: int | None

    @property
    def fault_seconds(self) -> list[float]:
        """When each fault was, from when all trained."""
        return [window.begin - self.began for window in self.windows]


@dataclass(frozen=True)
class Report:
    """What was asked and done, and what it came to; `loss_undisturbed` after as many samples.

    `costs` are pauses by kind of fault (costs.py).

    Where an engine's data are not dealt, nobody is to read what a lost cluster has `given_up` and
    `skipped` (left_out.py): numbers of samples, None where others read it.
    """

    options: Options
    faults: Sequence[Fault]
    verdict: Verdict
    loss_undisturbed: float | None
    costs: Mapping[str, Mapping[str, float]]
    given_up: int | None = None
    skipped: int | None = None
    course: Course | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        options = {**asdict(self.options), "directory": str(self.options.directory)}
        return {
            "engine": self.options.engine,
            "options": options,
            **asdict(self.verdict),
            "costs": self.costs,
            "samples_are_dealt": SERVED[self.options.engine].is_dealt,
            "samples_given_up": self.given_up,
            "samples_skipped": self.skipped,
            "loss_undisturbed": self.loss_undisturbed,
            "faults": [asdict(fault) for fault in self.faults],
        }


def measure(options: Options, tell: Callable[[str], None]) -> Report:
    """Run it; `tell` gets a line per fault. NoProgress where the run does not begin."""
    faults = draw(
        options.seed, options.num_events, options.num_clusters, options.num_ranks, options.kinds,
        options.longest_pause, options.comes_back,
    )  # fmt: skip
    suffered: list[Fault] = []
    windows: list[Window] = []
    last_step, stuck = None, list[str]()
    given_up, skipped = None, None
    served = SERVED[options.engine]
    of_step = served.samples_per_step(options.num_ranks)
    tell(f"starting {options.num_clusters} clusters of {options.num_ranks} ranks")
    with _clusters(options, options.directory / "disturbed") as clusters:
        everyone, began = {*clusters.alive}, time.monotonic()
        try:
            for number, window in enumerate(_inflict(options, clusters, faults, suffered), start=1):
                windows.append(window)
                seconds = window.end - window.begin
                tell(f"{number}/{len(faults)} {say(suffered[-1])}: {seconds:.1f} s")
            last_step = clusters.end()
        except NoProgress as error:  # what there is of the run is judged all the same
            stuck.append(f"those who are left do not go on: {error}")
            if len(suffered) > len(windows):
                last, since = suffered[-1], windows[-1].end if windows else 0.0
                windows.append(Window(last.kind, last.cluster, since, time.monotonic()))
        away = everyone - {*clusters.alive}
        verdict = check(clusters.logs(), windows, away, PLANS[options.preset], last_step)
        verdict.problems[:0] = stuck
        costs = costs_by_kind(clusters.logs(), windows)
        course = _course_of(clusters, windows, began, last_step)
        if not served.is_dealt:
            given_up, verdict.samples_lost = verdict.samples_lost, 0
            skipped = samples_skipped(clusters.logs(), of_step)
    loss = None
    if options.undisturbed and not stuck:
        steps = round(verdict.samples / options.num_clusters / of_step)
        tell(f"the same for {steps:,} steps without a fault")
        place = options.directory / "undisturbed"
        with _clusters(options, place, steps, _UNPACED_SECONDS) as clusters:
            clusters.finish()
            other = check(clusters.logs(), (), (), PLANS[options.preset], steps)
            verdict.problems += [f"undisturbed: {problem}" for problem in other.problems]
            loss = other.loss
    return Report(options, suffered, verdict, loss, costs, given_up, skipped, course)


def _course_of(
    clusters: Clusters, windows: Sequence[Window], began: float, last_step: int | None
) -> Course:
    logs = clusters.logs()
    steps, in_vain = steps_in_vain(logs)
    return Course(
        windows, began, time.monotonic() - began, steps, in_vain, pauses_of(logs, windows),
        last_step,
    )  # fmt: skip


def _inflict(
    options: Options, clusters: Clusters, faults: Sequence[Fault], suffered: list[Fault]
) -> Iterator[Window]:
    """Do one fault after another, each noted as it befalls whom; yield when each of them was."""
    inflictor = Inflictor(clusters)
    for drawn in faults:
        fault = inflictor.aim(drawn)
        suffered.append(fault)
        window = inflictor.suffer(fault)
        if comes_back_at_once(fault.kind, options.kinds, options.comes_back):
            clusters.bring_back(fault.cluster)
            window = replace(window, end=time.monotonic())
        yield window


def say(fault: Fault) -> str:
    """Say a fault in words."""
    how = ""
    if fault.kind in ("pause", "cut", "cut_one_way", "clock"):
        how = f" ({fault.seconds:+.1f} s)"
    elif fault.kind == "leave":
        how = " by dsx ctl" if fault.by_order else f", SIGTERM to rank {fault.rank}"
    elif fault.kind == "kill_rank":
        how = f", rank {fault.rank}"
    return f"{fault.kind} of cluster {fault.cluster}{how}"


def _clusters(
    options: Options,
    directory: Path,
    last_step: int = 1_000_000,
    step_seconds: float | None = None,
) -> Any:
    return clusters_of(
        directory, options.preset, options.num_clusters, options.num_ranks, options.seed,
        options.step_seconds if step_seconds is None else step_seconds,
        options.suspect_seconds, last_step, options.engine,
        1 if options.zero_stage is None else options.zero_stage,
        has_disks="full_disk" in options.kinds,
    )  # fmt: skip
