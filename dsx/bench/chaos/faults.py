"""Which faults a run is given, in which order: everything follows from a seed.

Where a cluster that is lost is started again, any may be lost at any time. Who leaves stays away
until a later join, where such are drawn. Where nobody comes back, losses and leaves are spread over
the run. More than half of those who train are always left, and two of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "kill_rank", "kill_cluster", "kill_leader", "pause", "reset", "cut", "cut_one_way", "garble",
    "not_finite", "too_large", "clock", "leave", "join", "full_disk",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
LOSSES: frozenset[Kind] = frozenset({"kill_rank", "kill_cluster", "kill_leader"})
ENDS: frozenset[Kind] = frozenset({*LOSSES, "leave"})  # the processes of a cluster
_FEWEST_LEFT = 2


@dataclass(frozen=True)
class Fault:
    """One fault: of which cluster and rank, for how long, where that has a meaning.

    kill_rank, kill_cluster  SIGKILL of a rank, whose cluster its launcher then ends; of all ranks
    kill_leader              SIGKILL of all ranks of the cluster that leads the log at that time
    pause                    SIGSTOP of all ranks of a cluster for `seconds`
    reset                    a cluster's connections are reset, once
    cut, cut_one_way         nothing passes a cluster's line for `seconds`; nothing that it sends
    garble                   one byte of what a cluster sends is changed on the line
    not_finite, too_large    a cluster contributes NaN; or 1e6 times what it has learnt
    clock                    a cluster's wall clock jumps by `seconds`, as its processes see it
    leave                    a cluster is told to leave: SIGTERM to a rank, or `by_order` dsx ctl
    join                     one that is away is started, on a machine that has nothing of it
    full_disk                the disk with a cluster's checkpoints is full until a save has failed
    """

    kind: Kind
    cluster: int
    rank: int = 0
    seconds: float = 0.0
    by_order: bool = False


def comes_back_at_once(kind: Kind, kinds: Sequence[Kind], comes_back: bool) -> bool:
    """Return whether whom a fault ends is started again behind it; else it stays away."""
    return comes_back and (kind in LOSSES or (kind == "leave" and "join" not in kinds))


def require_possible(kinds: Sequence[Kind], num_clusters: int, comes_back: bool) -> None:
    """Raise ValueError for kinds that could never be drawn."""
    goes = [k for k in kinds if k in ENDS and not comes_back_at_once(k, kinds, comes_back)]
    if "join" in kinds and not goes:
        raise ValueError(
            "--kinds join: nobody would be away to join; add leave, or with --no-comes-back any of "
            f"{', '.join(sorted(LOSSES))}"
        )
    if num_clusters <= _FEWEST_LEFT and {*kinds} <= {*goes, "leave", "join"}:
        raise ValueError(
            f"--kinds {','.join(kinds)}: of {num_clusters} clusters none may go; take --clusters 3 "
            "or more"
        )


def draw(
    seed: int,
    count: int,
    num_clusters: int,
    num_ranks: int,
    kinds: Sequence[Kind] = KINDS,
    longest_pause: float = 2.0,
    comes_back: bool = False,
) -> list[Fault]:
    """Return `count` faults, or fewer where no more are possible. Deterministic.

    `longest_pause` of a cluster or its line, in seconds. Who leads is known when the time has come:
    a cluster that is given here, and is not there or away then, stands for another one.
    """
    chance = random.Random(seed)
    present, away = list(range(num_clusters)), list[int]()
    going: list[Kind] = [
        k for k in kinds if k in ENDS and not comes_back_at_once(k, kinds, comes_back)
    ]
    passing: list[Kind] = [kind for kind in kinds if kind not in going]
    places = range(count)
    if "join" not in kinds:  # for good, so not all of them at the beginning
        num_going = min(count, max(0, num_clusters - _FEWEST_LEFT)) if going else 0
        if not passing:
            count = num_going
        places = {count * (i + 1) // (num_going + 1) for i in range(num_going)}
    drawn: list[Fault] = []
    for place in range(count):
        may_go = place in places and len(present) > _FEWEST_LEFT
        possible: list[Kind] = [k for k in passing if _is_possible(k, present, away, num_clusters)]
        if may_go and ("join" not in kinds or not possible):
            possible = going
        elif may_go:
            possible = [*possible, *going]
        kind = chance.choice(possible)
        cluster = chance.choice(away if kind == "join" else present)
        if kind in going:
            present.remove(cluster)
            away.append(cluster)
        elif kind == "join":
            away.remove(cluster)
            present.append(cluster)
        seconds = chance.uniform(0.2, longest_pause)
        if kind == "clock":
            seconds = chance.choice([-86_400.0, -3.0, 3.0, 86_400.0])
        by_order = kind == "leave" and chance.random() < 0.5
        drawn.append(Fault(kind, cluster, chance.randrange(num_ranks), seconds, by_order))
    return drawn


def _is_possible(
    kind: Kind, present: Sequence[int], away: Sequence[int], num_clusters: int
) -> bool:
    """Return whether a fault may befall a run of these, after which as many train as before."""
    if kind == "join":
        return bool(away)
    if kind == "leave":
        return len(present) > _FEWEST_LEFT
    # of two, the other one waits until it is back
    return kind not in LOSSES or len(present) > _FEWEST_LEFT or num_clusters == _FEWEST_LEFT
