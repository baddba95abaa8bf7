"""The coordinator's roll: who is heard from, and who should contribute (P3, S7)."""

from __future__ import annotations

from collections.abc import Iterable

from dsx.comm.membership.entries import Contributor, Contributors, contributor_of
from dsx.comm.membership.messages import Status
from dsx.comm.membership.replica import Replica
from dsx.comm.membership.state import State


class Roll:
    """What a coordinator knows of the others since it leads."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.told: dict[int, Status] = {}  # the last of each
        self._quiet = dict.fromkeys(replica.links, 0)  # ticks since
        self._apart: dict[
            tuple[int, int], int
        ] = {}  # ticks in which two have not reached each other
        self.to_drop: set[int] = set()  # whose digest differed from most others'

    def tick(self) -> None:
        """One tick more without a status."""
        for peer in self._quiet:
            self._quiet[peer] += 1
        links = {id: set(status.links) for id, status in self.told.items()}
        apart = [
            (a, b) for a in links for b in links if a < b and not (b in links[a] and a in links[b])
        ]
        self._apart = {pair: self._apart.get(pair, 0) + 1 for pair in apart}

    def meet(self, peer: int, is_new: bool) -> None:
        """A peer is linked; what an earlier process of it has told does not count."""
        self._quiet[peer] = 0
        if is_new:
            self.told.pop(peer, None)

    def take(self, peer: int, status: Status) -> None:
        """Keep the newest status."""
        known = self.told.get(peer)
        if known is None or status.sequence >= known.sequence:
            self.told[peer] = status
        self._quiet[peer] = 0

    def position(self, status: Status) -> int:
        """Return from which entry on a cluster needs the log."""
        return status.length if status.accepted == self._replica.accepted else status.index

    def lacks(self, status: Status) -> bool:
        """Return whether a cluster needs entries that are cut off here."""
        return self.position(status) < self._replica.log.base

    def holders(self, index: int) -> dict[int, int]:
        """Return the processes that hold entry `index` of this coordinator's log."""
        replica, accepted = self._replica, self._replica.accepted
        found = {
            id: replica.links.get(id, replica.newest.get(id, 0)) for id, status in self.told.items()
            if status.accepted == accepted and status.length > index
        }  # fmt: skip
        return {**found, replica.me.id: replica.me.incarnation}

    def reports(self, head: State) -> dict[int, dict[tuple[str, int], str]]:
        """Return what each contributor has reported of this epoch: (lane, number) to digest."""
        found: dict[int, dict[tuple[str, int], str]] = {}
        for contributor in head.contributors:
            status = self.told.get(contributor.id)
            is_of_view = status is not None and status.epoch == head.epoch  # S6: no older attempt
            reports = status.reports if status is not None and is_of_view else ()
            found[contributor.id] = {(r.lane, r.number): r.digest for r in reports}
        return found

    def have_finished(self, head: State) -> bool:
        """Return whether all contributors have done all of their work."""
        told = [self.told.get(c.id) for c in head.contributors]
        return all(s is not None and s.is_finished and s.epoch == head.epoch for s in told)

    def wanted(self, head: State) -> Contributors:
        """Return the contributors to have: alive, each linked with each (P3); else as before."""
        candidates = {c.id: c for c in head.contributors} | self._whole_joiners(head)
        me, old = self._replica.me.id, {c.id for c in head.contributors}
        order = sorted(candidates.values(), key=lambda c: (c.id != me, c.id not in old, c.id))
        here = [one for one in order if self._is_here(one, head)]
        for may_leave in (True, False):  # the last ones cannot
            wanted: dict[int, Contributor] = {}
            for one in here:
                if not (may_leave and self._leaves(one.id)) and self._meets_all(one.id, wanted):
                    wanted[one.id] = one
            processes = {c.id: c.incarnation for c in wanted.values()}
            if self._replica.is_quorum(head.contributors, processes):
                return tuple(sorted(wanted.values(), key=lambda c: c.id))
        return head.contributors

    def _whole_joiners(self, head: State) -> dict[int, Contributor]:
        """Return the joiners that have the result of every commit (S7)."""
        found: dict[int, Contributor] = {}
        for joiner in head.joiners:
            status = self.told.get(joiner.id)
            if status is None or self._replica.links.get(joiner.id) != joiner.incarnation:
                continue
            is_answered = status.request == status.answered == joiner.request
            is_whole = status.ready >= max(head.committed, 1)
            if is_answered and is_whole and not self.lacks(status):
                found[joiner.id] = Contributor(joiner.id, joiner.incarnation, status.weight)
        return found

    def _is_here(self, one: Contributor, head: State) -> bool:
        """Whether it is heard from, and can follow the log; a hung process's links stay up."""
        if one.id == self._replica.me.id:
            return True
        if (one.id, one.incarnation) in self._replica.out:
            return False
        status = self.told.get(one.id)
        if status and contributor_of(head.contributors, one.id):
            begins_anew = status.request and status.epoch == head.epoch
            if begins_anew or self.lacks(status):
                return False
        is_linked = self._replica.links.get(one.id) == one.incarnation
        return is_linked and self._quiet[one.id] <= self._replica.timing.patience

    def _meets_all(self, id: int, others: Iterable[int]) -> bool:
        """Whether it reaches each of the others and each of them reaches it, as far as they told.

        Where one of two is gone, the other may know it first: it is not to be the one who is
        dropped, so both stay until it shows (`Timing.doubt`).
        """
        counts = (self._apart.get((min(id, p), max(id, p)), 0) for p in others)
        return all(count <= self._replica.timing.doubt for count in counts)

    def _leaves(self, id: int) -> bool:
        status = self.told.get(id)
        return id in self.to_drop or (status is not None and status.is_leaving)
