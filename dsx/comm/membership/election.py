"""How a new coordinator takes over: promises of a quorum, and the best log among them."""

from __future__ import annotations

from dsx.comm.membership.entries import Ballot, Contributors, View, has_process
from dsx.comm.membership.log import Log
from dsx.comm.membership.messages import Prepare, Promise, Refusal
from dsx.comm.membership.replica import Replica


class Election:
    """One cluster's part: it promises, and may stand."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._campaign: Ballot | None = None
        self._promises: dict[int, tuple[int, Promise]] = {}  # with the incarnation
        self._waiting = 0  # ticks without a coordinator
        self._behind_in = -1  # the epoch in which this cluster was too far behind to lead
        self._taken_over = 0  # entries of the log with which this cluster has become coordinator

    def forget(self, peer: int) -> None:
        """Another process of that cluster is there now; it has promised nothing (S5)."""
        self._promises.pop(peer, None)

    def end(self) -> None:
        """Another one leads."""
        self._campaign = None

    def tick(self) -> int | None:
        """Stand if it is this cluster's turn (P2).

        Returns None, or, once this cluster has become coordinator, how many entries of its log are
        known to be decided.
        """
        replica = self._replica
        is_behind = self._behind_in == replica.state.epoch
        can_lead = replica.is_in_last_view and replica.standing.is_whole and not is_behind
        if not can_lead or replica.coordinator_lives:
            self._waiting = 0
            return None
        self._waiting += 1
        me, links = replica.me.id, replica.links
        rank = sum(c.id < me and c.id in links for c in replica.state.contributors)
        if self._waiting <= replica.timing.stagger * rank:
            return None
        self._waiting = -replica.timing.again
        return self._stand()

    def _stand(self) -> int | None:
        """Ask all for promises: who has no vote may still know that an entry is applied.

        Until enough have come, this cluster binds itself to nothing.
        """
        replica, me = self._replica, self._replica.me
        self._campaign = Ballot(
            replica.promised.number + 1, me.id, me.incarnation, replica.branch
        )  # fmt: skip
        self._promises = {}
        for peer in replica.links:
            replica.send(peer, Prepare(self._campaign, replica.state.index))
        return self._try_to_lead()

    def take_prepare(self, peer: int, prepare: Prepare) -> None:
        """Promise, unless a higher ballot is promised (S1) or the coordinator lives (P1)."""
        replica, candidate = self._replica, prepare.ballot
        is_owner = replica.promised.is_of(candidate.id, candidate.incarnation)
        if candidate < replica.promised or (replica.coordinator_lives and not is_owner):
            replica.send(peer, Refusal(replica.promised))
            return
        if candidate != replica.promised:
            replica.follow(candidate)
            replica.silence = self._waiting = 0  # but who asks again does not live by that
        if self._campaign and self._campaign < candidate:
            self._campaign = None
        index = replica.state.index
        start = max(replica.log.base, min(prepare.index, index))
        tail = replica.log.tail(start)
        replica.send(peer, Promise(candidate, replica.accepted, index, start, tail))

    def take_promise(self, peer: int, promise: Promise) -> int | None:
        """Count a promise; return what `tick` does."""
        if self._campaign != promise.ballot:
            return None
        self._promises[peer] = (self._replica.links[peer], promise)
        return self._try_to_lead()

    def take_refusal(self, refusal: Refusal) -> None:
        """Follow the higher ballot that somebody has promised."""
        if refusal.promised > self._replica.promised:
            self._replica.follow(refusal.promised)
            self._replica.silence, self._campaign = 0, None

    def _try_to_lead(self) -> int | None:
        """Take the best log promised, if a quorum of each of its views has promised (S3)."""
        replica = self._replica
        if self._campaign is None or self._campaign <= replica.promised:
            return None
        best, log = self._best_log()
        committed = replica.state.index
        for _, promise in self._promises.values():
            if (promise.accepted, promise.index) > best:
                return None  # it has applied what the best log here may lack
            committed = max(committed, promise.index)
        views = self._views_concerned(log, committed)
        if not has_process(views[-1], replica.me.id, replica.me.incarnation):
            self._behind_in = replica.state.epoch
            return None
        processes = {peer: incarnation for peer, (incarnation, _) in self._promises.items()}
        processes[replica.me.id] = replica.me.incarnation
        if not all(replica.is_quorum(view, processes) for view in views):
            return None
        replica.promised = replica.accepted = self._campaign
        self._campaign, replica.is_leading, replica.log = None, True, log
        self._taken_over = log.end
        return committed

    def _best_log(self) -> tuple[tuple[Ballot, int], Log]:
        """Return the log accepted under the highest ballot, then the longest, and how it ranks.

        What this cluster has appended under an own ballot and not applied has not been decided, as
        nobody else could, and will not be: it is left out. What it had taken over with that ballot
        may have been decided by who led before: it stays.
        """
        replica, me = self._replica, self._replica.me
        best, log = (replica.accepted, replica.log.end), replica.log
        if replica.accepted.is_of(me.id, me.incarnation):
            kept = max(replica.state.index, self._taken_over)
            best, log = (replica.accepted, kept), log.joined(kept, ())
        for _, promise in self._promises.values():
            if promise.accepted.is_of(me.id, me.incarnation):
                continue
            rank = (promise.accepted, promise.start + len(promise.tail))
            # joined only at what is applied here: what lies between would be taken for applied
            if promise.start <= replica.state.index and rank > best:
                best, log = rank, replica.log.joined(promise.start, promise.tail)
        return best, log

    def _views_concerned(self, log: Log, committed: int) -> list[Contributors]:
        """Return the view in force after `committed` entries, and those that may come to be."""
        views = [self._replica.state.contributors]
        for index in range(self._replica.state.index, log.end):
            entry = log.at(index)
            if isinstance(entry, View):
                views = ([] if index < committed else views) + [entry.contributors]
        return views
