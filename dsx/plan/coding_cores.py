"""How many cores a rank's coding needs: the fewest that hide it, as `coding.cores` is to say.

More than these change next to nothing of the time that is computing, also where coding takes twice
as long as is planned with: on a slower host, or one that is busy. What training keeps for itself is
beside them. A plan that is told what a rank has (`--cores-per-rank`) plans with that, has the run
keep to the number, and says if more would hide it. Else the number is for the reader alone, and a
run codes on all that training leaves: more than its host has would end it at its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsx.core.cores import OF_AN_ACCELERATOR
from dsx.plan.candidate import Candidate
from dsx.plan.candidates import Question, Search

MOST_CORES = 64  # of a rank, that are looked at
_UNSEEN = 1e-3  # of the time: less is no reason for another core
_MARGIN = 2.0  # times as long as is planned with, in which the number still does


@dataclass(frozen=True)
class CoresNeeded:
    """Of one way of running; `hiding` are more than `cores` where a rank has too few.

    The utilizations are those of slow coding: on `cores`, and on `hiding`.
    """

    cores: int
    hiding: int
    utilization: float
    utilization_hidden: float


def beside_training(cores_per_rank: int) -> int:
    """Return the cores of a rank that training on an accelerator leaves; one at least, as a run."""
    return max(1, cores_per_rank - OF_AN_ACCELERATOR)


def is_chosen(question: Question) -> bool:
    """Whether a plan chooses the number: it is not given, and no run has told it."""
    return question.coding_cores is None and (
        question.costs.cores is None or question.cores_beside is not None
    )


def cores_needed(candidate: Candidate, search: Search) -> CoresNeeded:
    """Return the fewest cores that do what all that a rank has do, and what hides its coding."""
    beside = search.question.cores_beside
    hiding = _fewest(candidate, search, MOST_CORES)
    cores = hiding if beside is None else min(hiding, _fewest(candidate, search, beside))
    slow = [_slow_utilization(candidate, search, number) for number in (cores, hiding)]
    return CoresNeeded(cores, hiding, *slow)


def with_cores(candidates: Sequence[Candidate], search: Search) -> list[Candidate]:
    """Return the candidates, each with the cores that it needs and what it does on them.

    As they are where their number is given.
    """
    if not is_chosen(search.question):
        return [*candidates]
    found: list[Candidate] = []
    for candidate in candidates:
        cores = cores_needed(candidate, search).cores
        told = search.predict(candidate.method, cores=cores)
        found.append(replace(candidate, coding_cores=cores, prediction=told))
    return found


def in_words(candidate: Candidate, search: Search) -> list[str]:
    """Say what was chosen and why, and what a rank lacks; nothing where it was given."""
    cores, question = candidate.coding_cores, search.question
    if cores is None:
        return []
    found, needed = candidate.prediction, cores_needed(candidate, search)
    beside = f"{OF_AN_ACCELERATOR} that training keeps"
    what = "needs" if question.cores_beside is None else "on"
    lines = [
        f"coding {what} {_count(cores)} of a rank, beside {beside}: {found.coding_seconds:.3g} s "
        f"of a round of {found.round_seconds:.4g} s"
    ]
    if question.cores_beside is None:
        lines[0] += "; a run has all that training leaves: --cores-per-rank says how many"
    elif needed.hiding > cores:
        lines.append(
            f"a rank has too few cores where coding takes {_MARGIN:g} times as long: "
            f"{needed.hiding} beside {beside} would be computing "
            f"{100 * needed.utilization_hidden:.2f} % of the time, {cores} "
            f"{100 * needed.utilization:.2f} %; use hosts with more, or fewer ranks on each"
        )
    return lines


def _fewest(candidate: Candidate, search: Search, most: int) -> int:
    """Return the fewest that do as well as `most` at slow coding, and reach the target as those do.

    At slow coding and at the speed that is planned with, each where `most` reach it.
    """
    target = search.question.target

    def at_speed(cores: int) -> float:
        return search.predict(candidate.method, cores=cores).utilization

    def reached(cores: int) -> float:
        return _slow_utilization(candidate, search, cores)

    best = reached(most)
    needed = max(best - _UNSEEN, target) if best >= target else best - _UNSEEN
    needed_at_speed = target if at_speed(most) >= target else 0.0

    def does(cores: int) -> bool:
        return reached(cores) >= needed and at_speed(cores) >= needed_at_speed

    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return high


def _slow_utilization(candidate: Candidate, search: Search, cores: int) -> float:
    return search.predict(candidate.method, cores=cores, slowdown=_MARGIN).utilization


def _count(cores: int) -> str:
    return "1 core" if cores == 1 else f"{cores} cores"
