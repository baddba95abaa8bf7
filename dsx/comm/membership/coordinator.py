"""What the coordinator appends: views, joins, commits, what is said, the end."""

from __future__ import annotations

from dsx.comm.membership.bounds import PENDING_BYTES
from dsx.comm.membership.entries import (
    Commit,
    Contributors,
    End,
    Entry,
    Join,
    Joiner,
    Said,
    View,
    contributor_of,
)
from dsx.comm.membership.messages import Outside, Status
from dsx.comm.membership.replica import Replica
from dsx.comm.membership.replication import Replication
from dsx.comm.membership.roll import Roll


class Coordinator:
    """Made anew with each ballot: it keeps nothing that the others lack."""

    def __init__(self, replica: Replica, num_decided: int) -> None:
        """Take over a log of which the first `num_decided` entries are known to be decided."""
        self._replica = replica
        self.roll = Roll(replica)
        self.replication = Replication(replica, self.roll)
        while replica.state.index < num_decided:
            self._apply_next()
        self.head = replica.state  # with what is not applied yet
        for entry in replica.log.tail(replica.state.index):
            self.head = self.head.after(entry)
        self._differed: dict[tuple[str, int], int] = {}  # transfer: attempts that differed
        self._held_for: dict[Joiner, int] = {}  # ticks
        self._hopeless_for = 0  # ticks in which a view under way had no quorum of its own

    def take_over(self) -> None:
        """Begin with a view: attempts in flight end, as their reports went to the old one."""
        if not self.head.is_ended:
            self._propose(self.roll.wanted(self.head))
        self.lead()

    def tick(self) -> None:
        """Resign without a quorum: the others may have another coordinator by now (P1)."""
        replica = self._replica
        self.roll.tick()
        if replica.is_quorum(replica.state.contributors, replica.here):
            replica.silence = 0
        elif replica.silence > replica.timing.patience:
            replica.is_leading = False
            return
        under_way = replica.log.views(replica.state.index)
        may_come = all(replica.is_quorum(view, replica.here) for view in under_way)
        self._hopeless_for = 0 if may_come else self._hopeless_for + 1
        if self._hopeless_for > replica.timing.hopeless:
            replica.is_leading = False  # and stands anew, without that view (S3)
            return
        self.replication.tick()
        self._held_for = {joiner: ticks + 1 for joiner, ticks in self._held_for.items()}
        self.lead(is_tick=True)

    def meet(self, peer: int, is_new: bool) -> None:
        """A peer is linked; `is_new`: by a process that was not met before."""
        self.roll.meet(peer, is_new)
        if is_new:
            self.replication.forget(peer, is_new)

    def take_status(self, peer: int, status: Status) -> None:
        """Take a status; tell one that thinks it contributes, and does not, that it is outside."""
        self.roll.take(peer, status)
        incarnation = self._replica.links[peer]
        is_inside = any(s.has(peer, incarnation) for s in (self._replica.state, self.head))
        if not status.request and not is_inside:
            epoch = self._replica.state.epoch
            self._replica.send(peer, Outside(self._replica.accepted, epoch))

    def lead(self, is_tick: bool = False) -> None:
        """Append what is due, apply what a quorum holds, send what the others lack."""
        self.roll.told[self._replica.me.id] = self._replica.status()
        if not self.head.is_ended:
            self._append_due()
        self._apply_held()
        if self._replica.is_leading:
            self.replication.replicate(is_tick)

    def _append_due(self) -> None:
        if self.head.epoch == self._replica.state.epoch:  # no view under way
            wanted = self.roll.wanted(self.head)
            if wanted != self.head.contributors:
                self._propose(wanted)
            elif not self._waits_for_joiner():
                self._commit_agreed()
        for peer, status in list(self.roll.told.items()):
            self._append_join(peer, status)
            self._append_said(peer, status)
        if self.roll.have_finished(self.head):
            self._append(End(self.head.epoch))

    # views and commits

    def _propose(self, wanted: Contributors) -> None:
        joiners = tuple(
            j for j in self.head.joiners
            if not contributor_of(wanted, j.id) and self._replica.links.get(j.id) == j.incarnation
        )  # fmt: skip
        self.roll.to_drop = set()
        is_forced = any(self.head.has(*one) for one in self._replica.out)
        self._append(View(self.head.epoch + 1, wanted, joiners, is_forced))

    def _waits_for_joiner(self) -> bool:
        """Whether commits wait for a joiner that is near: from farther and longer each try (P4)."""
        timing = self._replica.timing
        for joiner in self.head.joiners:
            status = self.roll.told.get(joiner.id)
            if status is None or self._replica.links.get(joiner.id) != joiner.incarnation:
                continue
            near = self.head.committed - timing.near * joiner.request**2
            is_near = status.request == joiner.request and 0 < status.ready >= near
            if is_near and not status.is_leaving:
                waited = self._held_for.setdefault(joiner, 0)
                if waited <= timing.patience * min(joiner.request, 8):
                    return True
        return False

    def _commit_agreed(self) -> None:
        """Commit what all contributors of this view have reported alike (S6)."""
        reports = self.roll.reports(self.head)
        for lane, number in reports.get(self._replica.me.id, {}):
            has_room = self.head.has_room_for_lane(lane) and not self._is_full()
            if number != self.head.next_number(lane) or not has_room:
                continue
            digests = {id: told.get((lane, number)) for id, told in reports.items()}
            if None in digests.values():
                continue
            if len(set(digests.values())) > 1:
                self._redo(lane, number, {id: str(digest) for id, digest in digests.items()})
                return
            digest = str(digests[self._replica.me.id])
            self._append(Commit(lane, number, self.head.epoch, digest))

    def _redo(self, lane: str, number: int, digests: dict[int, str]) -> None:
        """Begin a view, which makes the transfer again; the second time without who differs."""
        key = (lane, number)
        self._differed[key] = self._differed.get(key, 0) + 1
        if self._differed[key] > 1:
            own, all_digests = digests[self._replica.me.id], list(digests.values())
            kept = max(all_digests, key=lambda d: (all_digests.count(d), d == own))
            self.roll.to_drop = {id for id, digest in digests.items() if digest != kept}
        self._propose(self.roll.wanted(self.head))

    # the rest

    def _append_join(self, peer: int, status: Status) -> None:
        incarnation = self._replica.links.get(peer, 0)
        is_new = 0 < status.request != status.answered and not status.is_leaving
        if not incarnation or not is_new or self.head.has(peer, incarnation) or self._is_full():
            return
        joiner = Joiner(peer, incarnation, status.request)
        if joiner not in self.head.joiners:
            self._append(Join(joiner))

    def _append_said(self, peer: int, status: Status) -> None:
        if not status.sayings:
            return
        log = self._replica.log
        # one that had not applied an entry when it told us says it still, forgotten or not
        unseen = log.tail(max(log.base, min(status.index, log.end)))
        under_way = {entry.key for entry in unseen if isinstance(entry, Said)}
        for saying in status.sayings:
            key, value = saying.key, saying.value
            is_known = key in under_way or self.head.recalls(key)
            if not is_known and not self._is_full() and self.head.has_room_for(key, value):
                self._append(Said(key, value, peer, saying.lasts))

    def _is_full(self) -> bool:
        """Whether so much is not applied yet that nothing but a view may be added (P6)."""
        return self._replica.log.num_bytes(self._replica.state.index) > PENDING_BYTES

    def _append(self, entry: Entry) -> None:
        self.head = self.head.after(entry)
        self._replica.log.append(entry)

    def _apply_held(self) -> None:
        """Apply what a quorum holds (S2)."""
        replica = self._replica
        while replica.is_leading and replica.state.index < replica.log.end:
            entry = replica.log.at(replica.state.index)
            views = [replica.state.contributors]
            if isinstance(entry, View):
                views.append(entry.contributors)
            processes = self.roll.holders(replica.state.index)
            if not all(replica.is_quorum(view, processes) for view in views):
                return
            self._apply_next()
            if isinstance(entry, View) and not replica.is_member:
                self.replication.replicate(is_tick=True)  # who is left hears that it is applied
                replica.is_leading = False

    def _apply_next(self) -> None:
        entry = self._replica.log.at(self._replica.state.index)
        self._replica.apply_next()
        if isinstance(entry, Join):
            self.replication.offer_copy(entry)
