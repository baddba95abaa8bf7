"""What drives a cluster's part in the log: a thread of its first rank, over that rank's link.

It tells the participant of links, messages and time, sends what it wants sent, and hands on what
concerns the cluster: who the members are, one membership after another (`told`), and why there will
be none. Views of the same processes are one membership: an election changes nothing for a mean.

A process that its link has lost, or that another rank of this cluster has lost, is gone until both
reach it again, or for good once a view has left it out: what comes back then is another one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dsx.comm.links.departures import Departures
from dsx.comm.links.force import Force
from dsx.comm.links.link import Link
from dsx.comm.links.peer import SIGNS_PER_SUSPICION
from dsx.comm.links.quorum import Quorum, are
from dsx.comm.links.repeats import Repeats
from dsx.comm.links.requests import Answer, Name
from dsx.comm.membership.actions import Applied, Copy, Dropped, Send
from dsx.comm.membership.codec import MessageRefused
from dsx.comm.membership.entries import Contributor, Contributors, End, View, has_process
from dsx.comm.membership.messages import Status, decode, encode
from dsx.comm.membership.participant import Participant
from dsx.comm.membership.timing import Timing
from dsx.comm.views import Waits
from dsx.core.leaving import Reason
from dsx.core.membership import Member, Membership
from dsx.core.transport import PeerLost

_LOG = b"L"  # how the log's messages begin
_TICK_SECONDS = 0.1
_MOST_WAITING = 10_000  # messages of others
_END_SECONDS = 2.0  # in which the others may hear of the end
_TOLD_REFUSALS = 5
_FORCE_SECONDS = 2.0
Told = Membership | Waits | PeerLost
logger = logging.getLogger(__name__)


class Clerk:
    """One cluster's; `told` is called in its thread: with each membership, with whom this cluster
    waits for to go on, and at the end of all.
    """  # fmt: skip

    def __init__(
        self,
        link: Link,
        incarnations: Mapping[int, int],
        arbiter: int | None,
        suspect_seconds: float,
        told: Callable[[Told], object],
        lost_elsewhere: Callable[[], Mapping[int, tuple[int, str]]] = dict[int, tuple[int, str]],
        joins: bool = False,
    ) -> None:
        """`incarnations` are those of the first ranks of all clusters, which have met.

        `lost_elsewhere`: the clusters that other ranks of this one have lost, of which process of
        its first rank (0: of the first that was here), and what is said.
        `joins`: a run goes on already, which this cluster asks to be taken into; of others than
        itself `incarnations` then say nothing but that there may be such a cluster.
        """
        self._link, self._told, self._lost_elsewhere = link, told, lost_elsewhere
        self._everyone = tuple(sorted(incarnations))
        everyone = () if joins else tuple(Contributor(c, incarnations[c]) for c in self._everyone)
        self._is_in = not joins
        self._copy: Copy | None = None  # what this cluster, which joins, is to have
        self._is_ready = False
        patience = max(Timing.patience, round(suspect_seconds / _TICK_SECONDS))
        self._meets_until = time.monotonic() + suspect_seconds
        self._log = Participant(
            Contributor(link.cluster_id, incarnations[link.cluster_id]),
            incarnations,
            arbiter,
            Timing(patience=patience),
        )
        self._repeats = Repeats(suspect_seconds / SIGNS_PER_SUSPICION, time.monotonic)
        self._members: Contributors = everyone
        self._me = Contributor(link.cluster_id, incarnations[link.cluster_id])
        self.departures = Departures(arbiter)
        self.has_left = threading.Event()
        self._told_to_end: Reason | None = None  # and not said so yet
        self._is_leaving = False
        self._inbox: queue.Queue[tuple[Name, bytes]] = queue.Queue(_MOST_WAITING)
        self._forces: queue.Queue[Force] = queue.Queue()
        self._gone: dict[int, str] = {}
        self._seen: dict[int, int] = {}  # the last process of each cluster
        self._first_seen: dict[int, int] = {}
        self._apart: set[tuple[int, int, int]] = set()  # processes of another run, as told
        self._num_refused = 0
        self._has_finished = self._has_said_so = False  # this cluster has done its work
        self._is_closed = self._is_over = False  # over: all have
        self.quorum = Quorum(told)
        self.end: PeerLost | None = None  # why this cluster goes on with nobody, once that is told
        if not joins:
            self._log.begin(everyone)
        link.readmit()
        link.hold([c.id for c in everyone], 0)
        link.serve(self._receive, _LOG)
        self._thread = threading.Thread(target=self._run, name="dsx-clerk", daemon=True)
        self._thread.start()

    def facts(self) -> dict[str, Any]:
        """Return how the membership stands, as this cluster has it; any thread."""
        state, heard = self._log.state, self._link.silent_seconds
        others = [id for id in self._everyone if id != self._link.cluster_id]
        silent = {str(id): heard((id, 0)) for id in others}
        return {
            "view": state.epoch,
            "members": [c.id for c in state.contributors],
            "coordinator": self._log.coordinator,
            "waits_for": list(self._log.waits_for),
            "gone": {str(id): why for id, why in self._gone.copy().items()},
            "heard_seconds": {id: round(s, 3) for id, s in silent.items() if s is not None},
            **self.quorum.facts(),
        }

    def say_told_to_end(self, reason: Reason) -> None:
        """Say in the log that this cluster is told to end; `departures` has what comes of it."""
        self._told_to_end = reason

    @property
    def has_said_told(self) -> bool:
        """Whether the log says so."""
        return self.departures.has_said(self._me.id, self._me.incarnation)

    def may_leave(self, alone: bool = False) -> bool:
        """Whether the others could go on without this cluster, or if it were the only one to go."""
        return self.departures.could_go(self._me.id, self._log.state.contributors, alone)

    def leave(self) -> None:
        """Leave the others, as soon as they can go on; `has_left` once they do."""
        self._is_leaving = True

    @property
    def contributors(self) -> tuple[int, ...] | None:
        """The clusters that train, as this one, which joins, was told first; None before."""
        return None if self._copy is None else tuple(c.id for c in self._copy.state.contributors)

    @property
    def trains(self) -> tuple[int, ...]:
        """The clusters of the view in force."""
        return tuple(c.id for c in self._members)

    def ready(self) -> None:
        """This cluster, which joins, has all that it needs to be taken in."""
        self._is_ready = True

    def force(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Go on without clusters that are lost, as a member's tool asks; ValueError if refused."""
        force = Force(request)
        self._forces.put(force)
        return {"view": force.result(_FORCE_SECONDS)}

    def finish(self) -> None:
        """This cluster has done its work; once all have, nobody who leaves is missed."""
        self._has_finished = True

    def close(self) -> None:
        """End, once the others know that the run has, if it has."""
        self._is_closed = True
        self._thread.join(_END_SECONDS + 2 * _TICK_SECONDS)

    def _receive(self, asker: Name, body: bytes, answer: Answer) -> None:
        """Take a message, in the link's thread; the log makes up for one that is let go."""
        answer(b"")
        try:
            self._inbox.put_nowait((asker, body[len(_LOG) :]))
        except queue.Full:
            self._refuse(asker[0], "they come faster than they are taken")

    def _refuse(self, cluster: int, why: str) -> None:
        self._num_refused += 1
        if self._num_refused <= _TOLD_REFUSALS:
            logger.warning("a message of the log from cluster %d is let go: %s", cluster, why)

    def _run(self) -> None:
        try:
            self._meet_all()
            closes_at = float("inf")
            while not (self._is_closed and (self._log.is_over or not self._has_finished)):
                if self._is_closed:
                    closes_at = min(closes_at, time.monotonic() + _END_SECONDS)
                if time.monotonic() > closes_at:
                    return
                self._take_messages(time.monotonic() + _TICK_SECONDS)
                if self._has_finished and not self._has_said_so:
                    self._has_said_so = True
                    self._log.finish()
                self._take_leave()
                while not self._forces.empty():
                    self._forces.get().take(self._log)
                self._look_at_links()
                if self._is_ready and self._copy is not None and not self._is_in:
                    self._log.ready(self._copy.request, self._copy.state.index)
                self._log.tick()
                self._act()
        except Exception as error:
            logger.exception("the clerk has ended by an error")
            self._end(PeerLost(f"this cluster's clerk has ended by an error: {error}"))

    def _meet_all(self) -> None:
        """Take part once all who begin are reached: who calls late is not to be taken for gone."""
        first = {c.id for c in self._members if c != self._me}
        while not self._is_closed and time.monotonic() < self._meets_until:
            self._look_at_links()
            if first <= self._log.links.keys() | self._gone.keys():
                return
            time.sleep(_TICK_SECONDS / 10)

    def _take_leave(self) -> None:
        if self._told_to_end is not None:
            me, reason, self._told_to_end = self._me, self._told_to_end, None
            self._log.say(*Departures.saying(me.id, me.incarnation, reason))
        if self._is_leaving and not self.has_left.is_set():
            self._log.leave()

    def _take_messages(self, until: float) -> None:
        """Take what comes until the next tick, however much it is."""
        while (left := until - time.monotonic()) > 0:
            try:
                (cluster, rank), body = self._inbox.get(timeout=left)
            except queue.Empty:
                return
            if rank == 0:
                if cluster not in self._log.links:  # who speaks is there, and repeats nothing soon
                    self._look_at_links()
                incarnation = self._log.links.get(cluster)
                if incarnation is not None:
                    self._take(cluster, incarnation, body)
            self._act()

    def _take(self, cluster: int, incarnation: int, body: bytes) -> None:
        try:
            message = decode(body)
            if not isinstance(message, Status):  # it is answered, whatever was said before
                self._repeats.forget(cluster)
            self._log.receive(cluster, incarnation, message)
        except MessageRefused as error:
            self._refuse(cluster, str(error))

    def _look_at_links(self) -> None:
        elsewhere = self._lost_elsewhere()
        for cluster in self._everyone:
            if cluster == self._link.cluster_id:
                continue
            incarnation = self._link.process_at((cluster, 0))
            is_later = incarnation is not None and incarnation > self._seen.get(cluster, 0)
            if is_later and incarnation is not None:
                self._gone.pop(cluster, None)
                self._first_seen.setdefault(cluster, incarnation)
                self._seen[cluster] = incarnation
            of, told = elsewhere.get(cluster, (0, ""))
            is_of_this = (of or self._first_seen.get(cluster, 0)) == self._seen.get(cluster, 0)
            why = self._link.why_gone((cluster, 0)) or (told if is_of_this else "")
            if why and cluster not in self._gone:
                self._gone[cluster] = why
                logger.info("cluster %d is not reached: %s", cluster, why)
                self._repeats.forget(cluster)
                self._log.down(cluster)
            elif not why and incarnation is not None:
                self._gone.pop(cluster, None)  # it is reached again, as the same process
                if self._log.links.get(cluster) != incarnation:
                    self._repeats.forget(cluster)
                    self._log.up(cluster, incarnation)
            if self._link.has_let_go((cluster, 0)) and cluster in self.trains:
                self._end_left_out()
            self._tell_if_apart(cluster)
            self._act()
        self._require_quorum()

    def _tell_if_apart(self, cluster: int) -> None:
        """Say so, once for each process and branch, where a cluster is of another run."""
        met = cluster, self._seen.get(cluster, 0), self._log.branch
        is_apart = self._link.is_apart((cluster, 0)) and cluster not in self.trains
        if is_apart and met not in self._apart and not self._has_finished and self.end is None:
            self._apart.add(met)
            logger.warning(
                "cluster %d is reached, and goes on in another run than this one: a view has been "
                "forced (dsx ctl force-view), and since then the two learn apart; neither takes "
                "anything from the other. End one of them (dsx ctl stop), and start its clusters "
                "again: they join the other", cluster,
            )  # fmt: skip

    def _require_quorum(self) -> None:
        """Wait, or end, where too few are left for a majority."""
        if self.has_left.is_set() or self.end is not None:
            return
        members = [c.id for c in self._log.state.contributors]
        left = [id for id in members if id in self._gone]
        if self._is_over and left:  # who trains on with others after the end goes no further
            self._end(PeerLost(f"{are(left)} gone, after the end of the run"))
        elif not self._is_over:
            error = self.quorum.look(self._log.waits_for, self._gone, members)
            if error is not None:
                self._end(error)

    def _act(self) -> None:
        while self._log.actions:
            action = self._log.actions.popleft()
            if isinstance(action, Send):
                if self._repeats.is_due(action.peer, action.message):
                    self._link.ask((action.peer, 0), _LOG + encode(action.message))
            elif isinstance(action, Applied):
                self._take_up(action.entry)
            elif isinstance(action, Copy):
                self._copy = action
                self.departures.take_copy(action.state)
            elif isinstance(action, Dropped):
                self._end_left_out()
            else:
                self._end(PeerLost(action.reason))

    def _take_up(self, entry: Any) -> None:
        self._is_over = self._is_over or isinstance(entry, End)
        self.departures.take(entry, self._log.state.contributors)
        if not isinstance(entry, View) or entry.contributors == self._members:
            return
        left = self.departures.left(self._members, entry.contributors)
        self._members = entry.contributors
        if self._me.id not in {c.id for c in self._members} and self._is_leaving:
            self.has_left.set()
        own = self._link.cluster_id, self._link.incarnation
        self._is_in = self._is_in or has_process(entry.contributors, *own)
        if not self._is_in:
            return
        members = tuple(Member(c.id, c.weight, c.incarnation) for c in entry.contributors)
        self._told(Membership(entry.epoch, members, self._everyone, left))

    def _end_left_out(self) -> None:
        if self._is_leaving:
            self.has_left.set()
        self._end(PeerLost(
            f"the others have gone on without cluster {self._link.cluster_id}: it has to join them "
            "again, from a checkpoint"
        ))  # fmt: skip

    def _end(self, error: PeerLost) -> None:
        if self.end is None:
            self.end = error
            if not (self._is_over or self.has_left.is_set()):
                logger.error("%s", error)
            self._told(error)
