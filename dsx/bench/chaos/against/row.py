"""One row of the comparison: what a run with faults has come to, of dsx or of torchft."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dsx.bench.chaos.bench import Report


@dataclass(frozen=True)
class Pauses:
    """Of survivors, in seconds beyond their usual step; None where no fault has one."""

    median_seconds: float | None
    max_seconds: float | None
    sum_seconds: float | None

    @classmethod
    def of(cls, pauses: Sequence[float | None]) -> Pauses:
        """Sum up one of each fault; None where nobody took a step beside it."""
        told = [pause for pause in pauses if pause is not None]
        if not told:
            return cls(None, None, None)
        return cls(statistics.median(told), max(told), sum(told))


@dataclass(frozen=True)
class Row:
    """Rounds are of one fragment each; steps are of all clusters, a sample each.

    `rounds_kept_by_some` of those kept were not applied by all who had tried, who were healed.
    `steps_in_vain` are in no mean; `samples_lost` are in none, and nobody has read them again.
    `seconds` from when all trained to the end; `own_ends` of processes that nobody had ended.
    """

    name: str
    faults: int
    rounds_due: int
    rounds_kept: int
    rounds_lost: int
    rounds_kept_by_some: int
    mismatches: int
    pauses: Pauses
    steps: int
    steps_in_vain: float
    samples_lost: int
    own_ends: int
    loss: float | None
    seconds: float


def row_of_dsx(report: Report) -> Row:
    """Return that of dsx's own run."""
    verdict, course = report.verdict, report.course
    assert course is not None, "a run that was measured has one"
    due = verdict.rounds + verdict.rounds_refused + verdict.rounds_lost
    return Row(
        "dsx", sum(verdict.events.values()), due, verdict.rounds, verdict.rounds_lost, 0,
        verdict.mismatches, Pauses.of(course.pauses), course.work, course.in_vain,
        verdict.samples_lost, 0, verdict.loss, course.seconds,
    )  # fmt: skip
