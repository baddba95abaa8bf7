"""Samples that nobody is to read, where an engine's data are not dealt: those of a lost cluster.

Its loop reads by steps, and goes on at the step of the others. So there are two kinds. What it had
read and not committed is given up with it: the checker finds that in no committed contribution. And
what it would have read until it was back, nobody has read at all: it is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsx.bench.chaos.logs import Record, last, of_each_process


def samples_skipped(logs: Mapping[tuple[int, int], Sequence[Record]], samples_per_step: int) -> int:
    """Return how many samples clusters would have read at steps for which they were not there.

    Up to the last step of the run, for one that is not back by then.
    """
    ends = [end["step"] for log in logs.values() if (end := last(log, "end"))]
    skipped = 0
    for (_, rank), log in logs.items():
        if rank:
            continue
        reached = 0
        for process in of_each_process(log):
            steps = [record["step"] for record in process if record["what"] == "step"]
            if steps:
                skipped += max(0, steps[0] - reached - 1)
                reached = max(reached, steps[-1])
        skipped += max(0, max(ends, default=0) - reached)
    return samples_per_step * skipped
