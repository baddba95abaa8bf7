"""What a run with faults comes to, by what its ranks have written; nothing of dsx is asked.

A launch is named by its fragment and step. It is committed where a rank says that it has applied
its mean, with the anchor's hash behind it and the clusters that were averaged. What is refused
because a cluster contributed what must not enter a mean (a fault of ours) is no round, and not
lost. Of the samples of one process of a cluster those are in a committed contribution that it had
read up to a launch of its own that was committed with it; and all of them, where it was there at
the end, as the last average is of all parameters. What was read and is in none is lost, unless
somebody has read it again; what is in two is trained on twice.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsx.bench.chaos.logs import Record, Window, last, of_each_process, of_last_process

Rank = tuple[int, int]  # cluster, rank
Launch = tuple[int, int]  # fragment, step


@dataclass
class Verdict:
    """Counts, and pauses in seconds; `problems` says in words what is not as it should be."""

    rounds: int = 0
    rounds_lost: int = 0
    rounds_refused: int = 0
    events: dict[str, int] = field(default_factory=dict[str, int])
    joins: int = 0
    mismatches: int = 0
    pause_median_seconds: float | None = None
    pause_max_seconds: float | None = None
    samples: int = 0
    samples_lost: int = 0
    samples_twice: int = 0
    loss: float | None = None
    problems: list[str] = field(default_factory=list[str])

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, and all held the same."""
        is_lost = self.rounds_lost or self.samples_lost or self.samples_twice
        return not (self.mismatches or is_lost or self.problems)


def check(
    logs: Mapping[Rank, Sequence[Record]], windows: Sequence[Window], lost: Collection[int] = ()
) -> Verdict:
    """Read the logs of all ranks, and the times of the faults; `lost` clusters were killed."""
    verdict = Verdict(events=dict(sorted(Counter(w.kind for w in windows).items())))
    ended = {rank: end for rank, log in logs.items() if (end := last(of_last_process(log), "end"))}
    if not ended:
        verdict.problems.append("no rank has come to the end")
    for rank, log in logs.items():
        if rank[0] in lost:  # on purpose
            continue
        if failed := last(of_last_process(log), "failed"):
            verdict.problems.append(f"cluster {rank[0]}, rank {rank[1]}: {failed['why']}")
    _check_rounds(logs, ended, verdict)
    _check_end(ended, verdict)
    _check_samples(logs, ended, verdict)
    _measure_pauses(logs, windows, verdict)
    verdict.joins = sum(
        max(0, sum(record["what"] == "begin" for record in log) - 1)
        for (_, rank), log in logs.items() if not rank
    )  # fmt: skip
    return verdict


def _check_rounds(
    logs: Mapping[Rank, Sequence[Record]], ended: Mapping[Rank, Record], verdict: Verdict
) -> None:
    """Compare what the ranks of one number hold after each launch, and look for what nobody has."""
    lanes = sorted({rank for _, rank in logs})
    rounds, refused, lost = set[Launch](), set[Launch](), set[Launch]()
    for lane in lanes:
        held: dict[Launch, dict[int, Any]] = defaultdict(dict)
        due: dict[int, set[Launch]] = {}
        for (cluster, rank), log in logs.items():
            if rank != lane:
                continue
            launches = [r for r in of_last_process(log) if r["what"] == "launch"]
            due[cluster] = {(r["fragment"], r["step"]) for r in launches}
            for record in log:
                if record["what"] in ("commit", "refused"):
                    of = (record["fragment"], record["step"])
                    held[of][cluster] = (record["what"], record["hash"], record["by"])
        for of, by_cluster in sorted(held.items()):
            kinds = {(what, hash_) for what, hash_, _ in by_cluster.values()}
            if len(kinds) > 1:
                verdict.mismatches += 1
                verdict.problems.append(
                    f"lane {lane}, fragment {of[0]}, launch of step {of[1]}: clusters hold "
                    f"{ {cluster: told[:2] for cluster, told in by_cluster.items()} }"
                )
            if any(what == "commit" for what, _, _ in by_cluster.values()):
                rounds.add(of)
            elif all(by for _, _, by in by_cluster.values()):
                refused.add(of)
        for cluster, launches in due.items():
            if (cluster, lane) in ended:
                lost |= {of for of in launches if cluster not in held[of]}
        lost |= {of for of in held if of not in rounds and of not in refused}
    verdict.rounds, verdict.rounds_refused = len(rounds), len(refused)
    verdict.rounds_lost = len(lost)
    for of in sorted(lost)[:5]:
        verdict.problems.append(f"fragment {of[0]}, launch of step {of[1]}: lost")


def _check_end(ended: Mapping[Rank, Record], verdict: Verdict) -> None:
    """Compare the finished models, and who they say was there."""
    found = {(end["hash"], end["step"], tuple(end["members"])) for end in ended.values()}
    if len(found) > 1:
        verdict.mismatches += 1
        told = {rank: (end["hash"], end["step"], end["members"]) for rank, end in ended.items()}
        verdict.problems.append(f"at the end ranks hold different models: {told}")
    for end in ended.values():
        missing = [m for m in end["members"] if not any(cluster == m for cluster, _ in ended)]
        if missing:
            verdict.problems.append(f"clusters {missing} are said to be there, and have no end")
            break
    verdict.loss = next((end["loss"] for end in ended.values()), None)


def _check_samples(
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
    for (cluster, rank), log in logs.items():
        if rank:
            continue
        processes = of_each_process(log)
        for process in (one for one in processes if _steps(one)):
            steps = _steps(process)  # and it may have been killed in the one behind these
            own = [s for s in committed[cluster] if steps[0] <= s <= steps[-1] + 1]
            if process is processes[-1] and (end := ended.get((cluster, rank))) is not None:
                own.append(end["step"])
            last_inside = max(own, default=0)
            for record in process:
                if record["what"] == "step":
                    handed.update(record["samples"])
                    if record["step"] <= last_inside:
                        inside.update(record["samples"])
    verdict.samples = len(handed)
    verdict.samples_lost = len(handed - inside.keys())
    verdict.samples_twice = sum(count > 1 for count in inside.values())


def _steps(process: Sequence[Record]) -> list[int]:
    return [record["step"] for record in process if record["what"] == "step"]


def _measure_pauses(
    logs: Mapping[Rank, Sequence[Record]], windows: Sequence[Window], verdict: Verdict
) -> None:
    """Take each fault's longest step of a cluster that it did not befall, beyond the usual one."""
    steps = {
        rank: [(r["at"], r["seconds"]) for r in log if r["what"] == "step"]
        for rank, log in logs.items()
    }
    pauses: list[float] = []
    for window in windows:
        longest: list[float] = []
        for (cluster, _), taken in steps.items():
            if cluster == window.cluster:
                continue
            usual = [seconds for at, seconds in taken if not _is_in(windows, at)]
            beside = [seconds for at, seconds in taken if window.begin <= at <= window.end]
            if usual and beside:
                longest.append(max(beside) - statistics.median(usual))
        if longest:
            pauses.append(max(0.0, *longest))
    if pauses:
        verdict.pause_median_seconds = statistics.median(pauses)
        verdict.pause_max_seconds = max(pauses)


def _is_in(windows: Sequence[Window], at: float) -> bool:
    return any(window.begin <= at <= window.end for window in windows)
