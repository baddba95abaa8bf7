"""Rounds: what is due by the plan is committed by all who are there, with the same bits.

A launch is named by its fragment and step, and is one of a stage: all lanes of that stage have it.
It is committed where a rank says that it has applied its mean, with the anchor's hash behind it and
the clusters that were averaged. What is refused because a cluster contributed what must not enter a
mean, on purpose, is no round, and not lost.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dsx.bench.chaos.logs import Rank, Record, last, of_each_process
from dsx.bench.chaos.plan import Launch, Plan
from dsx.bench.chaos.verdict import Verdict

_NEVER = float("inf")


class _Held(NamedTuple):
    what: str
    hash: Any
    members: tuple[int, ...]
    by: tuple[int, ...]


class _Stage:
    """The lanes of one stage: what their ranks have launched, and hold, by launch."""

    def __init__(self, logs: Mapping[Rank, Sequence[Record]], lanes: Iterable[int]) -> None:
        self.lanes = sorted(lanes)
        self.logs = {of: log for of, log in logs.items() if of[1] in self.lanes}
        self.held: dict[Launch, dict[Rank, _Held]] = defaultdict(dict)
        self.spoilt: dict[Launch, set[int]] = defaultdict(set)  # clusters
        for (cluster, lane), log in self.logs.items():
            for record in log:
                if record["what"] in ("commit", "refused"):
                    self.held[_of(record)][cluster, lane] = _Held(
                        record["what"], record["hash"], tuple(record["members"]),
                        tuple(record["by"]),
                    )  # fmt: skip
                elif record["what"] == "launch" and record.get("is_spoilt"):
                    self.spoilt[_of(record)].add(cluster)

    def is_committed(self, of: Launch) -> bool:
        """Whether each lane has its mean."""
        found = {lane for (_, lane), held in self.held[of].items() if held.what == "commit"}
        return found == {*self.lanes}

    def is_refused_rightly(self, of: Launch) -> bool:
        """Whether all who have it refused it, for contributions that were wrong on purpose."""
        everyone = self.held[of].values()
        if {lane for _, lane in self.held[of]} != {*self.lanes}:
            return False
        return all(
            held.what == "refused" and held.by and {*held.by} <= self.spoilt[of]
            for held in everyone
        )


class _InOrder:
    """Launches by their steps."""

    def __init__(self, launches: Iterable[Launch]) -> None:
        self._launches = sorted(launches, key=lambda of: of[1])
        self._steps = [step for _, step in self._launches]

    def between(self, first: float, last: float) -> Sequence[Launch]:
        """Return those of first <= step <= last."""
        return self._launches[bisect_left(self._steps, first) : bisect_right(self._steps, last)]


def check_rounds(
    logs: Mapping[Rank, Sequence[Record]],
    ended: Mapping[Rank, Record],
    plan: Plan | None,
    verdict: Verdict,
) -> None:
    """Compare what ranks hold after each launch, and look for what nobody has."""
    told = {of: record for of, log in logs.items() if (record := last(log, "fragments"))}
    silent = sorted({*ended} - {*told})
    if plan is not None and silent:
        verdict.problems.append(f"ranks {silent} do not say how many fragments there are")
    stages: dict[int, set[int]] = defaultdict(set)
    for _, lane in logs:
        ours = [record["stage"][0] for (_, other), record in told.items() if other == lane]
        stages[ours[0] if ours else 0].add(lane)
    for index, lanes in sorted(stages.items()):
        stage = _Stage(logs, lanes)
        ours = {of: end for of, end in ended.items() if of[1] in lanes}
        count = {told[of]["count"] for of in ours if of in told}
        due: set[Launch] | None = None
        if plan is not None and len(count) == 1:
            last_step = max((end["step"] for end in ours.values()), default=0)
            due = plan.due(count.pop(), last_step, (index, len(stages)))
        _check_held(stage, verdict)
        interval = _NEVER if plan is None else plan.interval
        _check_lost(stage, ours, due, interval, verdict)
        _check_counts(stage, ours, verdict)


def _check_held(stage: _Stage, verdict: Verdict) -> None:
    """Compare what is held of each launch: in a lane all clusters the same, in all lanes a mean."""
    for of, held in sorted(stage.held.items()):
        kinds: dict[int, dict[_Held, list[int]]] = defaultdict(dict)
        for (cluster, lane), one in held.items():
            kinds[lane].setdefault(one._replace(by=()), []).append(cluster)
        differing = [lane for lane, ones in kinds.items() if len(ones) > 1]
        verdict.mismatches += len(differing)
        for lane in differing:
            told = {tuple(clusters): one[:3] for one, clusters in kinds[lane].items()}
            verdict.problems.append(f"lane {lane}, {_say(of)}: clusters hold {told}")
        over = {(one.what, one.members) for one in held.values()}
        if not differing and len(over) > 1:
            verdict.mismatches += 1
            verdict.problems.append(f"{_say(of)}: lanes hold {sorted(over)}")
        wrong = [
            cluster for cluster in sorted(stage.spoilt[of]) for one in held.values()
            if one.what == "commit" and cluster in one.members and cluster not in one.by
        ]  # fmt: skip
        if wrong:
            verdict.problems.append(
                f"{_say(of)}: what cluster {wrong[0]} contributed wrong on purpose is in the mean"
            )


def _check_lost(
    stage: _Stage,
    ended: Mapping[Rank, Record],
    due: set[Launch] | None,
    interval: float,
    verdict: Verdict,
) -> None:
    """Count what is due and not committed; and what one of those who were there has not had.

    `interval` of the plan, in which what was launched is applied; infinity where there is none.
    """
    rounds = {of for of in stage.held if stage.is_committed(of)}
    refused = {of for of in stage.held if stage.is_refused_rightly(of)}
    lost = {*stage.held} - rounds - refused
    for of in lost:
        if by := {c for held in stage.held[of].values() for c in held.by} - stage.spoilt[of]:
            verdict.problems.append(
                f"{_say(of)}: refused for what cluster(s) {sorted(by)} contributed, in which "
                "nothing was wrong on purpose"
            )
    had, wanted = _InOrder(rounds | refused), _InOrder(due or ())
    left_out: list[str] = []
    for rank, log in stage.logs.items():
        processes = of_each_process(log)
        for process in processes:
            goes_on = process is processes[-1] and rank in ended
            # of one that was killed: what it had last under way it need not have applied
            steps = [r["step"] for r in process if r["what"] == "step"]
            begins, until = min(steps, default=_NEVER), _NEVER
            if not goes_on:
                until = max(steps, default=0) - 2 * interval
            launched = {_of(record) for record in process if record["what"] == "launch"}
            left_out += [
                f"{_say(of)}: cluster {rank[0]} was left out of its mean, and was there"
                for of in sorted(launched & rounds)
                if of[1] <= (_NEVER if last(process, "left") else until)
                and all(rank[0] not in held.members for held in stage.held[of].values())
            ]
            held = {_of(r) for r in process if r["what"] in ("commit", "refused")}
            lost |= {of for of in launched - held if of[1] <= until}
            lost |= {*had.between(begins, until)} - held
            lost |= {*wanted.between(begins, until)} - launched
    if due is not None:
        lost |= due - rounds - refused
        strange = sorted((rounds | refused) - due)
        verdict.tell([f"{_say(of)}: launched, and nothing was due" for of in strange])
    verdict.rounds += len(rounds)
    verdict.rounds_refused += len(refused)
    verdict.rounds_lost += len(lost)
    verdict.tell([f"{_say(of)}: lost" for of in sorted(lost)])
    verdict.tell(sorted({*left_out}))


def _check_counts(stage: _Stage, ended: Mapping[Rank, Record], verdict: Verdict) -> None:
    """Compare what is counted here with what the ranks have counted themselves."""
    counted = Counter(
        fragment for fragment, step in stage.held if stage.is_committed((fragment, step))
    )
    for rank, end in ended.items():
        own = {fragment: rounds for fragment, rounds in enumerate(end["rounds"])}
        if any(own[fragment] != counted[fragment] for fragment in own):
            verdict.mismatches += 1
            verdict.problems.append(
                f"cluster {rank[0]}, rank {rank[1]}, has counted {end['rounds']} rounds of its "
                f"fragments; there were {[counted[fragment] for fragment in own]}"
            )
            return


def _of(record: Record) -> Launch:
    return record["fragment"], record["step"]


def _say(of: Launch) -> str:
    return f"fragment {of[0]}, launch of step {of[1]}"
