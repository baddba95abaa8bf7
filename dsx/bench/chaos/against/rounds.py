"""Rounds of torchft: each is tried by the groups of a quorum, and kept by those who step.

One try is named by its round, quorum and members. It is kept where any of its groups has applied
it, as all go on from there then: who has not is healed from who has. Where none has, the round is
lost, and what was in it; it is tried again with what is trained behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsx.bench.chaos.logs import Rank, Record, of_each_process

Key = tuple[int, int, tuple[int, ...], int]  # round, quorum, members, which one of these


@dataclass
class Try:
    """What became of one; `at` is when the last group has said so, by the clock of the logs."""

    members: tuple[int, ...]
    fragment: int
    at: float = 0.0
    kept: set[int] = field(default_factory=set[int])
    lost: set[int] = field(default_factory=set[int])
    hashes: set[str] = field(default_factory=set[str])


def up_to_the_end(process: Sequence[Record]) -> Sequence[Record]:
    """Return what a process has written up to its end; it goes on for others behind that."""
    ends = [place for place, record in enumerate(process) if record["what"] == "end"]
    return process[: ends[0] + 1] if ends else process


def tries_of(logs: Mapping[Rank, Sequence[Record]]) -> dict[Key, Try]:
    """Return every try of a round that any group tells of, up to the end of all."""
    ends = [r["round"] for log in logs.values() for r in log if r["what"] == "end"]
    tries: dict[Key, Try] = {}
    for (cluster, _), log in logs.items():
        seen = Counter[tuple[int, int, tuple[int, ...]]]()
        for process in of_each_process(log):
            for record in process:
                if record["what"] != "round" or (ends and record["round"] >= min(ends)):
                    continue
                # no quorum is told where there has never been any
                quorum = -1 if record["quorum"] is None else record["quorum"]
                of = record["round"], quorum, tuple(record["members"])
                seen[of] += 1
                one = tries.setdefault((*of, seen[of]), Try(of[2], record["fragment"]))
                one.at = max(one.at, record["at"])
                (one.kept if record["is_kept"] else one.lost).add(cluster)
                if record["is_kept"]:
                    one.hashes.add(record["hash"])
    return tries
