"""The first of all clusters founds the run, alone, and the others join it as any joiner does (S8).

Before, all that have a key must have answered one question: "I have no log". The question gets a
new number with each process that the founder meets. So whoever answers it was alive when the
founder had met the last of them, and had no log then, for no process loses its log but by ending. A
run lives only in processes that have its log: at that moment there was none.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsx.comm.membership.entries import Ballot, View
from dsx.comm.membership.messages import AskForLogs, NoLog
from dsx.comm.membership.replica import Replica


class Founding:
    """`everyone`: the ids of all clusters that have a key."""

    def __init__(self, replica: Replica, everyone: Iterable[int]) -> None:
        self._replica = replica
        self._others = set(everyone) - {replica.me.id}
        self._is_first = all(replica.me.id < other for other in self._others)
        self._question = 0
        self._empty: set[int] = set()  # who has answered it
        self._has_had_log = False  # which another branch takes away: a run lives there

    def meet(self) -> None:
        """A new process is there: earlier answers may be older than its log."""
        self._question += 1
        self._empty.clear()

    def is_due(self) -> bool:
        """Ask who has not answered; return whether all have, so that the run may be founded."""
        if not self._is_first or self._is_of_a_run or self._replica.standing.is_leaving:
            return False
        for peer in sorted(self._others - self._empty):
            if peer in self._replica.links:
                self._replica.send(peer, AskForLogs(self._question))
        return self._others <= self._empty

    @property
    def _is_of_a_run(self) -> bool:
        """Whether this process has a log, or has had one."""
        self._has_had_log = self._has_had_log or self._replica.log.end > 0
        return self._has_had_log

    def found(self) -> None:
        """Append and apply the first view: this cluster alone."""
        self._has_had_log = True
        replica, me = self._replica, self._replica.me
        ballot = Ballot(replica.promised.number + 1, me.id, me.incarnation)
        replica.promised = replica.accepted = ballot
        replica.is_leading, replica.silence = True, 0
        replica.standing.found()
        replica.log.append(View(1, (me,)))
        replica.apply_next()

    def answer(self, peer: int, message: AskForLogs) -> None:
        """Say so if there has been no log here."""
        if not self._is_of_a_run:
            self._replica.send(peer, NoLog(message.question))

    def take_answer(self, peer: int, message: NoLog) -> None:
        """Count an answer to the last question alone."""
        if message.question == self._question:
            self._empty.add(peer)
