"""Notices that every rank of every cluster gets at the same step, whoever has posted it.

    handle.notices.post("stop", {"reason": "a signal"})    # anywhere, in a signal handler, too
    for notice in handle.notices.due("stop"): ...           # after each step, on every rank

No store is asked and nobody waits for a notice: it travels in the handshake of the next transfer
(outer/notices.py), which all clusters take part in anyway. It takes effect at the boundary where
that transfer is applied, which follows from the step alone and is the same in all clusters. Where
the ranks of a cluster launch and apply apart from each other, as pipeline stages do, they put
together what each part has agreed on at every H-th step, by one number over the cluster's own
network, and it takes effect there.

Guarantees, with H the longest period, n the rounds that stay under way and d the steps between a
launch and its due application (n = d = 0 for a blocking method):

- a notice takes effect once, at one step on all ranks of all clusters, or, if a cluster is lost or
  training ends before, on none;
- at most H + d + n H steps after it was posted; H more where a cluster has parts that apply on
  their own, and H + d + n H more if it was posted by a rank that owns nothing of what is sent;
- notices that take effect at one step come in the same order everywhere (by cluster, rank, number);
- one that was under way when a checkpoint was loaded travels again, from the step loaded on, but
  for what is taken back then, on all ranks of all clusters; it is not saved.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from dsx.comm.in_cluster import InCluster
from dsx.comm.world import World
from dsx.outer.loop import OuterLoop
from dsx.outer.notices import Notice, NoticeCarrier


@dataclass(frozen=True)
class Due:
    """A notice that has taken effect at `step`; `cluster` and `rank` have posted it."""

    step: int
    kind: str
    payload: Any
    cluster: int
    rank: int


class Notices:
    """One rank's notices; `place` is its cluster and its rank there, `interval` is H."""

    def __init__(
        self,
        carrier: NoticeCarrier,
        place: tuple[int, int],
        interval: int,
        in_parts: InCluster | None,
    ) -> None:
        """`in_parts` are the cluster's ranks, where not all of them apply together."""
        self._carrier = carrier
        self._place = place
        self._interval = interval
        self._in_parts = in_parts
        self._numbers = itertools.count()
        self._of_part: list[Notice] = []
        self._known: set[Notice] = set()
        self._due: dict[str, list[Due]] = {}

    @classmethod
    def of(cls, world: World, loop: OuterLoop) -> Notices:
        """Return those of a rank of a cluster."""
        is_one_part = loop.adapter.ranks.shard[1] == world.world_size
        place, interval = (world.cluster_id, world.rank), loop.method.schedule.interval
        return cls(loop.notices, place, interval, None if is_one_part else world.in_cluster())

    @property
    def cluster(self) -> int:
        """This cluster."""
        return self._place[0]

    def post(self, kind: str, payload: Any = None) -> None:
        """Tell all ranks of all clusters; returns at once. ValueError above 4 kB of JSON."""
        number = next(self._numbers)
        self._carrier.post(Notice(*self._place, number, kind, json.dumps(payload)))

    def take_back(self, kind: str, is_stale: Callable[[Any], bool]) -> None:
        """Let no notice of a kind take effect whose payload is stale, whoever has posted it.

        Behind a load of a checkpoint, on all ranks of all clusters, which say so of the same.
        """

        def is_taken_back(notice: Notice) -> bool:
            return notice.kind == kind and is_stale(notice.payload)

        self._carrier.drop(is_taken_back)
        self._of_part = [notice for notice in self._of_part if not is_taken_back(notice)]
        self._due[kind] = [due for due in self._due.get(kind, []) if not is_stale(due.payload)]

    def pass_boundary(self, step: int) -> None:
        """Let what has been agreed on take effect; at every boundary, once all is applied."""
        fresh = self._carrier.take_agreed()
        if self._in_parts is None:
            self._take_effect(fresh, step)
            return
        self._of_part += fresh
        if step % self._interval:
            return
        what = f"notices of step {step}"
        if self._in_parts.any(what, bool(self._of_part)):
            everyone = self._in_parts.gather(what, [astuple(notice) for notice in self._of_part])
            merged = {Notice(*fields) for part in everyone for fields in part} - self._known
            self._known |= merged
            self._take_effect(sorted(merged), step)
            self._of_part = []

    def due(self, kind: str) -> list[Due]:
        """Return the notices of a kind that have taken effect since the last call for it."""
        return self._due.pop(kind, [])

    def _take_effect(self, notices: list[Notice], step: int) -> None:
        for notice in notices:
            due = Due(step, notice.kind, notice.payload, notice.cluster, notice.rank)
            self._due.setdefault(notice.kind, []).append(due)
