"""What torchft's groups have trained, and how much of it is in a round that was kept.

Of a fragment, what a group trains from one round of it to the next is in the later one. torchft
goes back to the last round where one is lost, takes what another group has where it heals, and
what a process has trained since its last round ends with it: that is in vain, for that part of the
fragments. What has come to the end is in the mean of all models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsx.bench.chaos.against.rounds import Key, Try, up_to_the_end
from dsx.bench.chaos.logs import Rank, Record, of_each_process


@dataclass(frozen=True)
class Work:
    """Steps taken, how many of them were in vain, and samples that are in nothing at all."""

    steps: int
    in_vain: float
    samples_lost: int


def work_of(
    logs: Mapping[Rank, Sequence[Record]],
    tries: Mapping[Key, Try],
    num_fragments: int,
    every: int,
    delay: int,
) -> Work:
    """Count it; a round is due `every` steps of a process, of what it had `delay` steps before."""
    steps, parts = 0, 0
    trained, inside = set[int](), set[int]()
    for (cluster, _), log in logs.items():
        processes = of_each_process(log)
        begins = [process[0]["at"] for process in processes if process]
        for number, process in enumerate(processes):
            process = up_to_the_end(process)
            read = {r["count"]: r["samples"] for r in process if r["what"] == "step"}
            until = begins[number + 1] if number + 1 < len(begins) else float("inf")
            unsaid = [
                one.fragment for one in tries.values()
                if one.kept and cluster in one.members and cluster not in one.kept | one.lost
                and process[0]["at"] <= one.at < until
            ] if process else []  # fmt: skip
            shares = _shares(process, read, num_fragments, unsaid, (every, delay))
            steps += len(read)
            parts += sum(shares.values())
            for count, samples in read.items():
                trained.update(samples)
                if shares[count]:
                    inside.update(samples)
    return Work(steps, steps - parts / num_fragments, len(trained - inside))


def _shares(
    process: Sequence[Record],
    read: Mapping[int, Sequence[int]],
    num_fragments: int,
    unsaid: Sequence[int],
    timing: tuple[int, int],
) -> dict[int, int]:
    """Return of each step of a process for how many fragments it is in what was kept."""
    shares = dict.fromkeys(read, 0)
    behind = [0] * num_fragments

    def enter(fragment: int, until: int) -> None:
        for count in range(behind[fragment] + 1, until + 1):
            if count in shares:
                shares[count] += 1
        behind[fragment] = max(behind[fragment], until)

    for record in process:
        if record["what"] == "heal":
            behind = [record["count"]] * num_fragments
        elif record["what"] == "round" and record["is_kept"]:
            enter(record["fragment"], record["prepared"])
        elif record["what"] == "round":
            behind[record["fragment"]] = record["count"]
        elif record["what"] == "end":
            for fragment in range(num_fragments):
                enter(fragment, record["count"])
    every, delay = timing
    last = max(read, default=0) + 1  # the step in which it may have been killed
    prepared = last - (last - (every - delay)) % every
    for fragment in unsaid:  # others have kept what it had no time to tell
        enter(fragment, prepared)
    return shares
