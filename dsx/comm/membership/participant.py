"""One cluster's part in the log: events are method calls, and `actions` is what comes of them.

Whoever drives it, from one thread, tells it of links, messages and time (`up`, `down`, `receive`,
`tick`), and of its own cluster (`done`, `say`, `ready`, `ask_again`, `leave`, `finish`). After each
event the driver takes the actions from the left until there are none. `docs/develop/membership.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager

from dsx.comm.membership import codec
from dsx.comm.membership.actions import Action
from dsx.comm.membership.bounds import CLUSTERS, LANES
from dsx.comm.membership.branches import forceable, may_follow, outside_of_branch
from dsx.comm.membership.coordinator import Coordinator
from dsx.comm.membership.election import Election
from dsx.comm.membership.entries import Contributor, Contributors, View, has_process
from dsx.comm.membership.founding import Founding
from dsx.comm.membership.messages import (
    Append,
    AskForLogs,
    Install,
    Message,
    NoLog,
    Outside,
    Prepare,
    Promise,
    Refusal,
    Report,
    Saying,
    Status,
)
from dsx.comm.membership.replica import Replica
from dsx.comm.membership.state import LogContradicted, State
from dsx.comm.membership.timing import Timing


class Participant:
    """A process of cluster `me.id`. `everyone`: the ids of all clusters that have a key.

    `me.incarnation` must be greater than that of every earlier process of this cluster. `arbiter`
    is the cluster whose half of an even split goes on, the same in all; None: neither half does.
    """

    def __init__(
        self,
        me: Contributor,
        everyone: Iterable[int],
        arbiter: int | None = None,
        timing: Timing | None = None,
    ) -> None:
        everyone = sorted(set(everyone))
        if len(everyone) > CLUSTERS:
            raise ValueError(f"{len(everyone)} clusters have a key, of {CLUSTERS} at most")
        if me.id not in everyone or (arbiter is not None and arbiter not in everyone):
            raise ValueError(
                f"cluster {me.id} and arbiter {arbiter} must be among the clusters that have a "
                f"key, {everyone}; add the key with `dsx keys add`"
            )
        self._replica = Replica(me, arbiter, timing or Timing())
        self._founding = Founding(self._replica, everyone)
        self._election = Election(self._replica)
        self._coordinator: Coordinator | None = None
        self._have_ended: set[int] = set()  # peers that have applied the end

    def begin(self, contributors: Contributors) -> None:
        """Begin with a first view that all of its contributors have agreed on, with equal states.

        In place of a founding, before the first event: while they agreed all of them lived, and
        none had a log (S8). ValueError if this process is not among them.
        """
        replica = self._replica
        if replica.log.end or not has_process(contributors, replica.me.id, replica.me.incarnation):
            raise ValueError(f"{replica.me} cannot begin with {contributors}")
        replica.standing.found()
        replica.log.append(View(1, contributors))
        replica.apply_next()

    # what whoever drives it may look at

    @property
    def actions(self) -> deque[Action]:
        """What is to be done, in this order; take from the left."""
        return self._replica.actions

    @property
    def state(self) -> State:
        """What the applied log says."""
        return self._replica.state

    @property
    def branch(self) -> int:
        """The forced view that its log goes on from, by its number; 0 for none (S10)."""
        return self._replica.branch

    @property
    def is_contributor(self) -> bool:
        """Whether this cluster has its part in attempts of the view in force."""
        return self._replica.is_contributor

    @property
    def is_coordinator(self) -> bool:
        """Whether it appends."""
        return self._replica.is_leading

    @property
    def coordinator(self) -> int | None:
        """The cluster that appends, as far as this one knows; None where nobody does."""
        replica = self._replica
        if replica.is_leading:
            return replica.me.id
        return replica.promised.id if replica.coordinator_lives else None

    @property
    def links(self) -> dict[int, int]:
        """The peers that are reached, and their incarnations."""
        return dict(self._replica.links)

    @property
    def request(self) -> int:
        """The number of the request to join, 0 of a contributor."""
        return self._replica.standing.request

    @property
    def stopped(self) -> str:
        """Why this cluster must not go on; empty while it may."""
        return self._replica.stopped

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The contributors of the view in force that are not reached, if it takes one to go on."""
        replica = self._replica
        if replica.has_quorum_of_all:
            return ()
        here = replica.here.items()
        return tuple(c.id for c in replica.state.contributors if (c.id, c.incarnation) not in here)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and all who are reached know it: nobody needs this one."""
        replica = self._replica
        linked = {c.id for c in replica.state.contributors} & replica.links.keys()
        all_know = replica.floor >= replica.state.index or linked <= self._have_ended
        return replica.state.is_ended and all_know

    # events: links, messages, time

    def up(self, peer: int, incarnation: int) -> None:
        """A connection to a process of a peer is there, both ways; its key has proved the two."""
        replica = self._replica
        if incarnation < replica.newest.get(peer, 0) or peer == replica.me.id:
            return
        with self._stopping_if_contradicted() as may_go_on:
            if not may_go_on:
                return
            is_new = replica.newest.get(peer) != incarnation
            replica.newest[peer] = replica.links[peer] = incarnation
            if is_new:
                self._election.forget(peer)
                self._founding.meet()
                self._have_ended.discard(peer)
            if self._coordinator:
                self._coordinator.meet(peer, is_new)
            self._report()

    def down(self, peer: int) -> None:
        """The connection has ended, or the peer has been silent for too long."""
        self._replica.links.pop(peer, None)
        with self._stopping_if_contradicted() as may_go_on:
            if may_go_on and self._coordinator:
                self._coordinator.replication.forget(peer, is_new=False)
                self._lead()

    def receive(self, peer: int, incarnation: int, message: Message) -> None:
        """A message of a process that the connection has proved; of others it is dropped."""
        with self._stopping_if_contradicted() as may_go_on:
            if may_go_on and self._replica.links.get(peer) == incarnation:
                self._take(peer, message)
                self._lead()

    def tick(self) -> None:
        """One tick has passed."""
        with self._stopping_if_contradicted() as may_go_on:
            if may_go_on:
                self._tick()

    # events: the own cluster

    def done(self, lane: str, number: int, epoch: int, digest: str) -> bool:
        """The attempt (number, epoch) of a lane has ended here, and its result is held.

        Returns False, and does nothing, if a view or a commit has made that attempt void.
        ValueError for another digest of the same attempt, and for one lane more than fit.
        """
        replica = self._replica
        is_of_view = epoch == replica.state.epoch and replica.is_contributor
        if replica.stopped or not is_of_view or number < replica.state.next_number(lane):
            return False
        if not replica.state.has_room_for_lane(lane):
            raise ValueError(f"lane {lane!r} is one more than the {LANES} that a log has room for")
        report = Report(lane, number, digest)
        codec.encode(Report, report)
        replica.standing.report(report)
        self._report()
        return True

    def say(self, key: str, value: str, lasts: int = 0) -> None:
        """Have something said, unless somebody has said that key before; see `state.said`.

        It is remembered for `lasts` entries, 0 for good. MessageRefused beyond the bounds.
        """
        saying = Saying(key, value, lasts)
        codec.encode(Saying, saying)  # refused here, by whom it concerns
        if not self._replica.state.recalls(key):
            self._replica.standing.sayings.setdefault(key, saying)
            self._report()

    def ready(self, request: int, index: int) -> None:
        """A joiner has the copy for that request, and the results of the first `index` entries."""
        self._replica.standing.have_copied(request, index)
        if index >= self._replica.state.committed:
            self._report()  # else with the next tick

    def ask_again(self) -> None:
        """A joiner's copy cannot be had any more: ask for another one."""
        if self._replica.standing.request:
            self._replica.standing.ask_again()
            self._report()

    def leave(self) -> None:
        """Leave the run as soon as a quorum remains without this cluster."""
        self._replica.standing.is_leaving = True
        self._report()

    def force(self, without: Collection[int], branch: int) -> None:
        """Go on without clusters of the view in force, as an operator has said that they do not.

        All of the others have to be told the same, with the same `branch`, a number that is greater
        than that of any force before. ValueError where there is nothing to be forced.
        """
        self._replica.force(forceable(self._replica, without, branch), branch)
        self._election.end()
        self._coordinator = None

    def finish(self) -> None:
        """This cluster has done all of its work; once all contributors have, the run ends."""
        self._replica.standing.is_finished = True
        self._report()

    # how they are handled

    @contextmanager
    def _stopping_if_contradicted(self) -> Generator[bool, None, None]:
        """Yield whether this cluster may go on; stop it if the log cannot be followed (S9)."""
        try:
            yield not self._replica.stopped
        except LogContradicted as error:
            self._replica.stop(str(error))

    def _report(self) -> None:
        if self._replica.stopped:
            return
        if self._replica.is_leading:
            self._lead()
        else:
            self._replica.tell()

    def _lead(self) -> None:
        if self._replica.is_leading and self._coordinator:
            self._coordinator.lead()

    def _tick(self) -> None:
        replica, standing = self._replica, self._replica.standing
        replica.silence += 1
        if replica.is_leading and self._coordinator:
            self._coordinator.tick()
            return
        replica.tell()
        standing.asking += 1
        if self._founding.is_due():
            self._founding.found()
            self._coordinator = Coordinator(replica, replica.state.index)
            self._coordinator.lead()
            return
        if standing.request and not standing.is_leaving:
            timing = replica.timing
            is_answered = standing.answered == standing.request
            is_lost = is_answered and replica.silence > timing.patience
            patience = timing.retry * min(standing.request, 8)
            if is_lost or (not is_answered and standing.asking > patience):
                replica.ask_again()
        self._take_over(self._election.tick())

    def _take_over(self, num_decided: int | None) -> None:
        if num_decided is not None:
            self._coordinator = Coordinator(self._replica, num_decided)
            self._coordinator.take_over()

    def _take(self, peer: int, message: Message) -> None:
        replica = self._replica
        if not may_follow(replica, message):
            if answer := outside_of_branch(replica, message):
                replica.send(peer, answer)
            return
        if isinstance(message, Append | Install | Prepare | Outside):
            if message.ballot.is_of(peer, replica.links[peer]):  # nobody uses another's (S1)
                self._take_from_owner(peer, message)
        elif isinstance(message, Status):
            self._take_status(peer, message)
        elif isinstance(message, Promise):
            self._take_over(self._election.take_promise(peer, message))
        elif isinstance(message, Refusal):
            self._election.take_refusal(message)
        elif isinstance(message, AskForLogs):
            self._founding.answer(peer, message)
        else:
            assert isinstance(message, NoLog)
            self._founding.take_answer(peer, message)

    def _take_from_owner(self, peer: int, message: Append | Install | Prepare | Outside) -> None:
        replica = self._replica
        if isinstance(message, Prepare):
            self._election.take_prepare(peer, message)
        elif isinstance(message, Install):
            replica.take_install(peer, message)
        elif isinstance(message, Append):
            if not replica.is_deposed(peer, message.ballot):
                self._election.end()
                replica.follow(message.ballot)
                replica.take_append(message)
        else:
            replica.take_outside(message)

    def _take_status(self, peer: int, status: Status) -> None:
        replica = self._replica
        if replica.state.is_ended and status.index >= replica.state.index:
            self._have_ended.add(peer)
        if replica.is_leading and self._coordinator:
            self._coordinator.take_status(peer, status)
