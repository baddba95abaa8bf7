"""The run of torchft beside dsx's: the same faults, and what both have come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsx.bench.chaos.against.check import check
from dsx.bench.chaos.against.groups import Groups, groups_of
from dsx.bench.chaos.against.inflicting import inflict
from dsx.bench.chaos.against.job import LEFT_OUT, GroupJob, final_path, job_of, version
from dsx.bench.chaos.against.row import Row, row_of_dsx
from dsx.bench.chaos.bench import Report, say
from dsx.bench.chaos.costs import costs_by_kind
from dsx.bench.chaos.faults import Kind
from dsx.bench.chaos.forking import NoProgress
from dsx.bench.chaos.logs import Window


@dataclass(frozen=True)
class Comparison:
    """Both rows; `costs` are torchft's, by kind of fault (costs.py).

    `late_seconds` of each fault that torchft had not recovered for in time; `problems` in words.
    """

    version: str
    job: GroupJob
    ours: Row
    theirs: Row
    costs: Mapping[str, Mapping[str, float]]
    late_seconds: Sequence[float]
    own_ends: Sequence[str]
    problems: Sequence[str]
    left_out: Mapping[Kind, str]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": "torchft", **asdict(self)}


def compare(report: Report, tell: Callable[[str], None]) -> Comparison:
    """Give torchft the faults that dsx has had; `tell` gets a line per fault."""
    course, options = report.course, report.options
    assert course is not None, "a run that was measured has one"
    job, problems = job_of(options), list[str]()
    windows, late = list[Window](), list[float]()
    tell(f"starting torchft with {job.num_clusters} groups of one process")
    with groups_of(job) as groups:
        began, has_ended, total = time.monotonic(), False, len(course.windows)
        try:
            faults = inflict(
                groups, report.faults, course.fault_seconds, options.kinds, options.comes_back
            )
            for number, (window, seconds) in enumerate(faults):
                windows.append(window)
                late.append(seconds)
                took = f"{window.end - window.begin:.1f} s"
                tell(f"torchft {number + 1}/{total} {say(report.faults[number])}: {took}")
            groups.end((course.last_step or 0) // job.every)
            has_ended = True
        except NoProgress as error:  # what there is of the run is judged all the same
            problems.append(f"torchft's run does not go on: {error}")
            if len(windows) < total:
                stuck, since = report.faults[len(windows)], windows[-1].end if windows else began
                windows.append(Window(stuck.kind, stuck.cluster, since, time.monotonic()))
        if missing := [say(fault) for fault in report.faults[len(windows) :]]:
            problems.append(f"faults that torchft was not given: {'; '.join(missing)}")
        seconds = time.monotonic() - began
        logs = groups.logs()
        loss = _loss(groups) if has_ended else None
        theirs = check(logs, windows, groups.job, options, loss, seconds)
        return Comparison(
            version(), groups.job, row_of_dsx(report), theirs, costs_by_kind(logs, windows), late,
            [*groups.own_ends], problems, LEFT_OUT,
        )  # fmt: skip


def _loss(groups: Groups) -> float:
    """Return the loss of the mean of all groups' models, as they were at the end."""
    import torch

    from dsx.bench.chaos.engines.teacher import Net, Teacher

    paths = [final_path(Path(groups.job.directory), cluster) for cluster in groups.alive]
    states = [torch.load(path, weights_only=True) for path in paths]
    net = Net(groups.job.seed)
    net.load_state_dict({
        name: torch.stack([state[name] for state in states]).mean(dim=0) for name in states[0]
    })  # fmt: skip
    return Teacher(groups.job.seed).loss_of(net)
