"""What a run with faults comes to, by what its ranks have written; nothing of dsx is asked.

Rounds (rounds.py), samples (samples.py), processes (processes.py), pauses (pauses.py), the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from dsx.bench.chaos.logs import Rank, Record, Window, last, of_last_process
from dsx.bench.chaos.pauses import measure_pauses
from dsx.bench.chaos.plan import Plan
from dsx.bench.chaos.processes import check_processes
from dsx.bench.chaos.rounds import check_rounds
from dsx.bench.chaos.samples import check_samples
from dsx.bench.chaos.verdict import Verdict


def check(
    logs: Mapping[Rank, Sequence[Record]],
    windows: Sequence[Window],
    away: Collection[int] = (),
    plan: Plan | None = None,
    last_step: int | None = None,
) -> Verdict:
    """Read the logs of all ranks, and the times of the faults.

    `away` are the clusters that are not to be there at the end, `plan` says what is due, and
    `last_step` where all were told to end.
    """
    verdict = Verdict(events=dict(sorted(Counter(w.kind for w in windows).items())))
    ended = {rank: end for rank, log in logs.items() if (end := last(of_last_process(log), "end"))}
    if not ended:
        verdict.problems.append("no rank has come to the end")
    check_processes(logs, windows, away, verdict)
    check_rounds(logs, ended, plan, verdict)
    _check_end(ended, last_step, verdict)
    check_samples(logs, ended, verdict)
    measure_pauses(logs, windows, verdict)
    return verdict


def _check_end(ended: Mapping[Rank, Record], last_step: int | None, verdict: Verdict) -> None:
    """Compare the finished models, and who they say was there."""
    found = {(end["hash"], end["step"], tuple(end["members"])) for end in ended.values()}
    if len(found) > 1:
        verdict.mismatches += 1
        told = {rank: (end["hash"], end["step"], end["members"]) for rank, end in ended.items()}
        verdict.problems.append(f"at the end ranks hold different models: {told}")
    for end in ended.values():
        clusters = {cluster for cluster, _ in ended}
        missing = [m for m in end["members"] if m not in clusters]
        if missing:
            verdict.problems.append(f"clusters {missing} are said to be there, and have no end")
            break
        if unnamed := sorted(clusters - {*end["members"]}):
            verdict.problems.append(f"clusters {unnamed} have come to the end, and are not named")
            break
    steps = {end["step"] for end in ended.values()}
    if last_step is not None and steps and steps != {last_step}:
        verdict.problems.append(f"the end was to be at step {last_step}, and came at {min(steps)}")
    verdict.loss = next((end["loss"] for end in ended.values()), None)
