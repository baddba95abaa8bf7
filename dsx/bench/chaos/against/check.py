"""What a run of torchft comes to, by what its processes have written; torchft is not asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsx.bench.chaos.against.job import GroupJob
from dsx.bench.chaos.against.rounds import tries_of
from dsx.bench.chaos.against.row import Row, Times, back
from dsx.bench.chaos.against.work import work_of
from dsx.bench.chaos.bench import Options
from dsx.bench.chaos.logs import Rank, Record, Window
from dsx.bench.chaos.pauses import pauses_of


def check(
    logs: Mapping[Rank, Sequence[Record]],
    windows: Sequence[Window],
    job: GroupJob,
    options: Options,
    loss: float | None,
    seconds: float,
) -> Row:
    """Read the logs of all groups, and the times of the faults."""
    tries = tries_of(logs)
    kept = [one for one in tries.values() if one.kept]
    work = work_of(logs, tries, job.fragments, job.every, job.delay)
    return Row(
        "torchft", len(windows), len(tries), len(kept), len(tries) - len(kept),
        sum(bool(one.lost) for one in kept), sum(len(one.hashes) > 1 for one in kept),
        Times.of(pauses_of(logs, windows)), back(windows, options), work.steps, work.in_vain,
        work.samples_lost, loss, seconds,
    )  # fmt: skip
