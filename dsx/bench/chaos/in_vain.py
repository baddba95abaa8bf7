"""Steps in vain: what a cluster has trained, and no mean has.

Of a fragment, what a cluster trains from one launch to the next is in the later one's contribution.
It is in vain where that contribution is in no mean, or where the process ended before it: a step
counts by the part of the fragments for which it is in vain. A process that comes to the end has all
in the last average. Whether somebody reads those samples again is another question (samples.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dsx.bench.chaos.logs import Rank, Record, last, of_each_process


def steps_in_vain(logs: Mapping[Rank, Sequence[Record]]) -> tuple[int, float]:
    """Return how many steps the clusters have taken, and how many of these were in vain.

    By the logs of first ranks, as those of plain PyTorch are: all ranks have all fragments.
    """
    averaged: dict[int, set[tuple[int, int]]] = defaultdict(set)  # launches, by cluster
    for log in logs.values():
        for record in log:
            if record["what"] == "commit":
                for cluster in record["members"]:
                    averaged[cluster].add((record["fragment"], record["step"]))
    taken, in_vain = 0, 0.0
    for (cluster, rank), log in logs.items():
        if rank:
            continue
        processes = of_each_process(log)
        said = {_of(r) for r in log if r["what"] == "launch"}
        for process in processes:
            steps = [record["step"] for record in process if record["what"] == "step"]
            told = last(process, "fragments")
            taken += len(steps)
            if not steps or told is None:
                in_vain += len(steps)
                continue
            kept = averaged[cluster]
            # it may have been killed behind its last launch, and before it had said so
            unsaid = {of for of in kept - said if of[1] in (steps[-1], steps[-1] + 1)}
            launched = {_of(r) for r in process if r["what"] == "launch"} | unsaid
            has_end = last(process, "end") is not None
            for fragment in range(told["count"]):
                inside = _inside(fragment, steps, launched, kept, has_end)
                in_vain += (len(steps) - inside) / told["count"]
    return taken, in_vain


def _inside(
    fragment: int,
    steps: Sequence[int],
    launched: set[tuple[int, int]],
    kept: set[tuple[int, int]],
    has_end: bool,
) -> int:
    """Return how many steps of a process are in a mean of one fragment."""
    inside, behind = 0, steps[0] - 1
    for of in sorted(of for of in launched if of[0] == fragment):
        if of in kept:
            inside += sum(behind < step <= of[1] for step in steps)
        behind = of[1]
    return inside + (sum(behind < step for step in steps) if has_end else 0)


def _of(record: Record) -> tuple[int, int]:
    return record["fragment"], record["step"]
