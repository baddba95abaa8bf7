"""Which faults a run is given, in which order: everything follows from a seed.

Where a cluster that is lost is started again, any may be lost at any time. Where losses are for
good, they are spread over the run, and come only while more than half of those who train are left,
and two of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "kill_rank", "kill_cluster", "kill_leader", "pause", "reset", "cut", "cut_one_way", "garble",
    "not_finite", "too_large", "clock",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
LOSSES: frozenset[Kind] = frozenset({"kill_rank", "kill_cluster", "kill_leader"})
_FEWEST_LEFT = 2
_LEADER = -1


@dataclass(frozen=True)
class Fault:
    """One fault: of which cluster and rank, for how long, where that has a meaning.

    kill_rank, kill_cluster  SIGKILL of a rank, whose cluster its launcher then ends; of all ranks
    kill_leader              SIGKILL of all ranks of the cluster that leads the log
    pause                    SIGSTOP of all ranks of a cluster for `seconds`
    reset                    a cluster's connections are reset, once
    cut, cut_one_way         nothing passes a cluster's line for `seconds`; nothing that it sends
    garble                   one byte of what a cluster sends is changed on the line
    not_finite, too_large    a cluster contributes NaN; or 1e6 times what it has learnt
    clock                    a cluster's wall clock jumps by `seconds`, as its processes see it
    """

    kind: Kind
    cluster: int
    rank: int = 0
    seconds: float = 0.0


def draw(
    seed: int,
    count: int,
    num_clusters: int,
    num_ranks: int,
    kinds: Sequence[Kind] = KINDS,
    longest_pause: float = 2.0,
    comes_back: bool = False,
) -> list[Fault]:
    """Return `count` faults. Deterministic. A cluster that is lost gets no more, or `comes_back`.

    `longest_pause` of a cluster or its line, in seconds. The cluster that leads is taken to be the
    living one with the lowest id, as it is until somebody else had to take over.
    """
    chance = random.Random(seed)
    alive = list(range(num_clusters))
    losing: list[Kind] = [kind for kind in kinds if kind in LOSSES]
    passing: list[Kind] = [kind for kind in kinds if kind not in LOSSES]
    if comes_back:
        losing, passing = [], list(kinds)
    num_losses = min(count, num_clusters - _FEWEST_LEFT) if losing else 0
    if not passing:
        count = num_losses
    places = {count * (i + 1) // (num_losses + 1) for i in range(num_losses)}
    drawn: list[Fault] = []
    for place in range(count):
        if place in places or not passing:
            kind = chance.choice(losing)
            cluster = alive[0] if kind == "kill_leader" else chance.choice(alive)
            alive.remove(cluster)
        else:
            kind = chance.choice(passing)
            cluster = alive[0] if kind == "kill_leader" else chance.choice(alive)
        seconds = chance.uniform(0.2, longest_pause)
        if kind == "clock":
            seconds = chance.choice([-86_400.0, -3.0, 3.0, 86_400.0])
        drawn.append(Fault(kind, cluster, chance.randrange(num_ranks), seconds))
    return drawn
