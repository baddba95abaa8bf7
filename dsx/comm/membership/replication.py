"""How the coordinator's log gets to the others, and what of it is kept (P6)."""

from __future__ import annotations

from dsx.comm.membership.bounds import KEPT_BYTES
from dsx.comm.membership.entries import Join, Joiner
from dsx.comm.membership.messages import Append, Install, Status
from dsx.comm.membership.replica import Replica
from dsx.comm.membership.roll import Roll


class Replication:
    """One coordinator's; a copy is kept for each joiner until it has begun with it."""

    def __init__(self, replica: Replica, roll: Roll) -> None:
        self._replica, self._roll = replica, roll
        self._sent: dict[int, tuple[int, int]] = {}  # end and index told since the last tick
        self._copies: dict[int, Install] = {}

    def tick(self) -> None:
        """Whatever was sent before may be lost."""
        self._sent = {}

    def forget(self, peer: int, is_new: bool) -> None:
        """A connection has ended; with a new process, also what was for the old one."""
        self._sent.pop(peer, None)
        if is_new:
            self._copies.pop(peer, None)

    def offer_copy(self, entry: Join) -> None:
        """Give a joiner the state as of its join, which has just been applied."""
        replica, joiner = self._replica, entry.joiner
        if replica.links.get(joiner.id) == joiner.incarnation:
            # with all of the log behind it: it counts as a log of this ballot (S4)
            tail = replica.log.tail(replica.state.index)
            copy = Install(replica.accepted, joiner.request, replica.state, tail)
            self._copies[joiner.id] = copy
            replica.send(joiner.id, copy)

    def replicate(self, is_tick: bool) -> None:
        """Send to voters, and to joiners that have their copy, what they lack; then cut off."""
        replica, floors = self._replica, [self._replica.state.index]
        me = replica.me.id
        voters = {c.id: c.incarnation for v in replica.views() for c in v if c.id != me}
        followers = self._following_joiners(is_tick)
        for peer, incarnation in {**voters, **followers}.items():
            if replica.links.get(peer) == incarnation:
                status = self._roll.told.get(peer)
                floors.append(status.index if status else 0)
                self._send_log(peer, status, is_tick, is_voter=peer in voters)
            elif peer in voters and not replica.state.is_ended:
                floors.append(0)
        replica.floor = max(min(floors), self._start_of_kept())
        replica.log.cut(min(replica.floor, replica.state.index))

    def _following_joiners(self, is_tick: bool) -> dict[int, int]:
        """Return those that have begun with their copy; send it again to the others."""
        found: dict[int, int] = {}
        for joiner in self._replica.state.joiners:
            if self._has_begun(joiner):
                found[joiner.id] = joiner.incarnation
            elif is_tick and joiner.id in self._copies:
                self._replica.send(joiner.id, self._copies[joiner.id])
        return found

    def _has_begun(self, joiner: Joiner) -> bool:
        status = self._roll.told.get(joiner.id)
        return status is not None and status.answered == joiner.request

    def _send_log(self, peer: int, status: Status | None, is_tick: bool, is_voter: bool) -> None:
        replica = self._replica
        position = self._roll.position(status) if status else replica.state.index
        start = max(position, self._sent.get(peer, (0, 0))[0], replica.log.base)
        mark = (replica.log.end, replica.state.index)
        if is_tick or self._sent.get(peer) != mark:  # an empty one tells that we are alive
            tail, floor = replica.log.tail(start), replica.floor
            replica.send(peer, Append(replica.accepted, start, tail, replica.state.index, floor))
            self._sent[peer] = mark
        if is_tick and is_voter and status and self._roll.lacks(status):
            # it needs what this log does not have any more: it votes on, and joins again
            tail = replica.log.tail(replica.state.index)
            replica.send(peer, Install(replica.accepted, 0, replica.state, tail))

    def _start_of_kept(self) -> int:
        """Return from where on the applied entries are kept for who lags."""
        log, index = self._replica.log, self._replica.state.index
        start, excess = log.base, log.num_bytes(log.base) - KEPT_BYTES
        while excess > 0 and start < index:
            start, excess = start + 1, log.num_bytes(start + 1) - KEPT_BYTES
        return start
