"""Samples: what is handed out is in one committed contribution.

Of the samples of one process of a cluster those are in a committed contribution that it had read up
to a launch of its own that was committed with it; and all of them, where it was there at the end,
as the last average is of all parameters. What was read and is in none is lost, unless somebody has
read it again; what is in two is trained on twice. Ranks of a cluster share samples or have others:
what they have read in a step counts once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from dsx.bench.chaos.logs import Rank, Record, of_each_process
from dsx.bench.chaos.verdict import Verdict


def check_samples(
    logs: Mapping[Rank, Sequence[Record]], ended: Mapping[Rank, Record], verdict: Verdict
) -> None:
    """Count what was handed out and is in no committed contribution, and what is in two."""
    committed: dict[int, set[int]] = defaultdict(set)  # steps of launches, by cluster
    for log in logs.values():
        for record in log:
            if record["what"] == "commit":
                for cluster in record["members"]:
                    committed[cluster].add(record["step"])
    handed, inside = set[int](), Counter[int]()
    for cluster in sorted({cluster for cluster, _ in logs}):
        own = {of: of_each_process(log) for of, log in logs.items() if of[0] == cluster}
        count = max(len(processes) for processes in own.values())
        launched = [
            {r["step"] for r in _of_process(own, number) if r["what"] == "launch"}
            for number in range(count)
        ]
        times = Counter(step for steps in launched for step in steps)
        for number in range(count):
            read = _read_by(_of_process(own, number))
            if not read:
                continue
            # it may have been killed behind its last launch, and before it had said so
            unsaid = {step for step in (max(read), max(read) + 1) if not times[step]}
            possible = launched[number] | unsaid
            ends = [e["step"] for of, e in ended.items() if of[0] == cluster]
            if number == count - 1 and ends:
                last_inside = max(ends)
            else:
                last_inside = max(committed[cluster] & possible, default=0)
            for step, samples in read.items():
                handed |= samples
                if step <= last_inside:
                    inside.update(samples)
    verdict.samples = len(handed)
    verdict.samples_lost = len(handed - inside.keys())
    verdict.samples_twice = sum(count > 1 for count in inside.values())


def _of_process(own: Mapping[Rank, Sequence[Sequence[Record]]], number: int) -> list[Record]:
    """Return what all ranks of a cluster have written as their `number`th process."""
    return [r for of_rank in own.values() for one in of_rank[number : number + 1] for r in one]


def _read_by(records: Sequence[Record]) -> dict[int, set[int]]:
    """Return the samples of each step."""
    read: dict[int, set[int]] = defaultdict(set)
    for record in records:
        if record["what"] == "step":
            read[record["step"]].update(record["samples"])
    return read
