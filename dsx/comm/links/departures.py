"""Which clusters are told to end, and whether the others can go on: the same for all, by the log.

A cluster that is told to end says so in the log and trains on for a while, as a scheduler that
takes back one site may be about to take all. As long as those who have not been told are a majority
of the view, or have the arbiter, they go on, and each of the others leaves. Where they are not, all
save and end, also one that was about to leave. Every cluster comes to that at the same entry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from dsx.comm.membership.entries import Contributors, Said, View
from dsx.comm.membership.quorum import is_quorum
from dsx.comm.membership.state import State
from dsx.core.leaving import Reason

_KEY = "leave"
logger = logging.getLogger(__name__)


class Departures:
    """What a cluster's log says of them. Written by one thread, read by others."""

    def __init__(self, arbiter: int | None) -> None:
        self._arbiter = arbiter
        self._wishes: dict[tuple[int, int], Reason] = {}  # by cluster and incarnation, in order
        self.all_end: Reason | None = None  # why all save and end, if they do

    @staticmethod
    def saying(id: int, incarnation: int, reason: Reason) -> tuple[str, str]:
        """Return key and value of what a cluster says in the log that is told to end."""
        return f"{_KEY}/{id}/{incarnation}", json.dumps(reason.signal)

    def take(self, entry: Any, contributors: Contributors) -> None:
        """Take an entry that has been applied; `contributors` are those after it."""
        if isinstance(entry, Said):
            self._take_wish(entry)
        if isinstance(entry, Said | View) and self.all_end is None:
            self._judge(contributors)

    def take_copy(self, state: State) -> None:
        """Take what the log says at the place from which this cluster, which joins, follows it."""
        for key, known in state.said.items():
            self._take_wish(Said(key, known.value, known.by))
        if self.all_end is None:
            self._judge(state.contributors)

    def has_said(self, id: int, incarnation: int) -> bool:
        """Whether a process has said that it is told to end."""
        return (id, incarnation) in self._wishes

    def left(self, before: Contributors, after: Contributors) -> tuple[int, ...]:
        """Return those of a view who are not in the next one, and had said that they would go."""
        stay = {c.id for c in after}
        return tuple(
            c.id for c in before if c.id not in stay and (c.id, c.incarnation) in self._wishes
        )

    def could_go(self, id: int, contributors: Contributors, alone: bool = False) -> bool:
        """Whether the others could go on if that cluster left as well, or `alone`."""
        going = {c.id for c in contributors if self.has_said(c.id, c.incarnation) and not alone}
        return self._can_go_on(contributors, going | {id})

    def _take_wish(self, entry: Said) -> None:
        kind, *rest = entry.key.split("/")
        if kind != _KEY:
            return
        try:
            (id, incarnation), number = map(int, rest), int(json.loads(entry.value))
            reason = Reason(id, number, leaves=True)
            told = reason.name
        except (ValueError, TypeError, RecursionError):
            logger.warning("cluster %d says of a leave what is none: %.80r", entry.by, entry.key)
            return
        if id != entry.by:
            logger.warning("cluster %d says that cluster %d is to leave: let go", entry.by, id)
            return
        self._wishes.setdefault((id, incarnation), reason)
        logger.info("cluster %d is told to end by %s", id, told)

    def _judge(self, contributors: Contributors) -> None:
        going = [c for c in contributors if self.has_said(c.id, c.incarnation)]
        if not going or self._can_go_on(contributors, {c.id for c in going}):
            return
        first = next(
            who for who in self._wishes if any(who == (c.id, c.incarnation) for c in going)
        )
        self.all_end = self._wishes[first].for_all()
        logger.warning(
            "%s told to end, and the others of %s could not go on alone: all save and end",
            _are([c.id for c in going]), _names([c.id for c in contributors]),
        )  # fmt: skip

    def _can_go_on(self, contributors: Contributors, going: set[int]) -> bool:
        stay = {c.id: c.incarnation for c in contributors if c.id not in going}
        return is_quorum(contributors, stay, {}, self._arbiter)


def _names(ids: Sequence[int]) -> str:
    return f"cluster{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def _are(ids: Sequence[int]) -> str:
    return f"{_names(ids)} {'are' if len(ids) > 1 else 'is'}"
