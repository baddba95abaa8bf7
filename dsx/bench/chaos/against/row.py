"""One row of the comparison: what a run with faults has come to, of dsx or of torchft."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dsx.bench.chaos.bench import Options, Report
from dsx.bench.chaos.logs import Window


@dataclass(frozen=True)
class Times:
    """Of several, in seconds; None where there are none."""

    median_seconds: float | None
    max_seconds: float | None
    sum_seconds: float | None

    @classmethod
    def of(cls, times: Sequence[float | None]) -> Times:
        """Sum up some, of which None are none."""
        told = [seconds for seconds in times if seconds is not None]
        if not told:
            return cls(None, None, None)
        return cls(statistics.median(told), max(told), sum(told))


@dataclass(frozen=True)
class Row:
    """Rounds are of one fragment each; steps are of all clusters, a sample each.

    `rounds_kept_by_some` of those kept were not applied by all who had tried, who were healed.
    `pauses` of survivors are beyond a usual step; `back` is how long it took from a kill until the
    cluster trained with the others again, or from the start of one that joins.
    `steps_in_vain` are in no mean; `samples_lost` are in none, and nobody has read them again.
    `seconds` are from when all trained to the end.
    """

    name: str
    faults: int
    rounds_due: int
    rounds_kept: int
    rounds_lost: int
    rounds_kept_by_some: int
    mismatches: int
    pauses: Times
    back: Times
    steps: int
    steps_in_vain: float
    samples_lost: int
    loss: float | None
    seconds: float


def row_of_dsx(report: Report) -> Row:
    """Return that of dsx's own run."""
    verdict, course = report.verdict, report.course
    assert course is not None, "a run that was measured has one"
    due = verdict.rounds + verdict.rounds_refused + verdict.rounds_lost
    return Row(
        "dsx", sum(verdict.events.values()), due, verdict.rounds, verdict.rounds_lost, 0,
        verdict.mismatches, Times.of(course.pauses), back(course.windows, report.options),
        course.steps, course.in_vain, verdict.samples_lost, verdict.loss, course.seconds,
    )  # fmt: skip


def back(windows: Sequence[Window], options: Options) -> Times:
    """Return how long it took until who was killed, or joins, was back.

    kill_leader is not among them: with torchft no cluster is killed by it.
    """
    return Times.of([
        window.end - window.begin for window in windows
        if window.kind == "join"
        or (window.kind in ("kill_rank", "kill_cluster") and options.comes_back)
    ])  # fmt: skip
