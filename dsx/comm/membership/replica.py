"""What one cluster holds of the log, what it has promised, and with whom it is linked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from dsx.comm.membership.actions import Action, Applied, Copy, Dropped, Send, Stopped
from dsx.comm.membership.entries import Ballot, Commit, Contributor, Contributors, View, has_process
from dsx.comm.membership.log import Log
from dsx.comm.membership.messages import Append, Install, Message, Outside, Refusal, Status
from dsx.comm.membership.quorum import is_quorum
from dsx.comm.membership.standing import Standing
from dsx.comm.membership.state import State
from dsx.comm.membership.timing import Timing


class Replica:
    """The part that every cluster has, the coordinator, too."""

    def __init__(self, me: Contributor, arbiter: int | None, timing: Timing) -> None:
        self.me, self.arbiter, self.timing = me, arbiter, timing
        self.state, self.log = State(), Log()  # the log's entries before state.index are applied
        self.promised = self.accepted = Ballot()
        self.is_leading = False
        self.links: dict[int, int] = {}  # living peers: their incarnations
        self.newest: dict[int, int] = {}  # of each cluster: the last incarnation met
        self.silence = 0  # ticks without the coordinator; of a coordinator: without a quorum
        self.floor = 0  # entries that everybody has applied
        self.standing = Standing()
        self.actions: deque[Action] = deque()
        self.stopped = ""  # why this cluster must not go on
        self.out: frozenset[tuple[int, int]] = frozenset()  # processes that are said not to go on

    # who is who

    @property
    def here(self) -> dict[int, int]:
        """The processes that are reached, with this one."""
        return {**self.links, self.me.id: self.me.incarnation}

    @property
    def is_member(self) -> bool:
        """Whether this process is in the view in force."""
        return self.state.has(self.me.id, self.me.incarnation)

    @property
    def is_contributor(self) -> bool:
        """Whether it has its part in attempts: is a member, with all that is committed."""
        return self.is_member and not self.standing.request

    def views(self) -> list[Contributors]:
        """Return the view in force, and those in the log that are not applied yet."""
        return [self.state.contributors, *self.log.views(self.state.index)]

    @property
    def is_in_last_view(self) -> bool:
        """Whether this process is in the last view that it knows of, applied or not."""
        return has_process(self.views()[-1], self.me.id, self.me.incarnation)

    def is_quorum(self, contributors: Contributors, processes: Mapping[int, int]) -> bool:
        """Return whether these processes may decide for a view."""
        return is_quorum(contributors, processes, self.newest, self.arbiter, self.out)

    @property
    def has_quorum_of_all(self) -> bool:
        """Whether those who are reached may decide, also if nobody were to be left out by force.

        So what is forced may be asked for again, until all who are to go on have it.
        """
        return is_quorum(self.state.contributors, self.here, self.newest, self.arbiter)

    @property
    def branch(self) -> int:
        """What this cluster's log has gone on from: a forced view's number, or 0 (S10)."""
        return self.promised.branch

    def force(self, out: Contributors, branch: int) -> None:
        """Go on without those, on a branch of one's own: nothing of another is taken (S10).

        All who are told the same carry over what they have promised and accepted, so the order
        among their logs stays; whoever led stands again.
        """
        self.out = frozenset((c.id, c.incarnation) for c in out)
        self.promised = replace(self.promised, branch=branch)
        self.accepted = replace(self.accepted, branch=branch)
        self.is_leading, self.silence = False, self.timing.patience + 1

    @property
    def coordinator_lives(self) -> bool:
        """Whether the owner of the ballot promised is linked and has been heard of late (P1).

        One who stands and has not led yet has less time: it may lack what it takes to lead.
        """
        promised, timing = self.promised, self.timing
        is_linked = promised.number > 0 and self.links.get(promised.id) == promised.incarnation
        patience = timing.patience if self.accepted == promised else timing.candidacy
        return self.is_leading or (is_linked and self.silence <= min(patience, timing.patience))

    # what goes out

    def send(self, peer: int, message: Message) -> None:
        """Put a message out."""
        self.actions.append(Send(peer, message))

    def status(self) -> Status:
        """Return all there is to know of this cluster."""
        standing = self.standing
        standing.sequence += 1
        return Status(
            standing.sequence, self.accepted, self.log.end, self.state.index, self.state.epoch,
            tuple(sorted(self.here)), standing.reports, standing.next_sayings, standing.request,
            standing.answered, standing.ready, self.me.weight, standing.is_leaving,
            standing.is_finished,
        )  # fmt: skip

    def tell(self) -> None:
        """Send the status to the coordinator, or to all where nobody knows who that is."""
        standing, owner = self.standing, self.promised.id
        is_asking = standing.answered != standing.request
        if is_asking or self.silence > self.timing.patience:
            peers = list(self.links)
        else:
            peers = [owner] if self.promised.number and owner in self.links else []
        for peer in peers:
            self.send(peer, self.status())

    def stop(self, reason: str) -> None:
        """Do nothing any more: the others see a silent member, and go on without it."""
        self.stopped, self.is_leading = f"cluster {self.me.id} stops: {reason}", False
        self.actions.append(Stopped(self.stopped))

    # following

    def apply_next(self) -> None:
        """Apply the next entry; LogContradicted if that is not what this cluster can follow."""
        index = self.state.index
        entry = self.log.at(index)
        state = self.state.after(entry)
        if isinstance(entry, Commit) and self.is_contributor:
            self.standing.require_own(entry)
        self.state = state
        if isinstance(entry, View):
            self.out = frozenset(one for one in self.out if state.has(*one))
        self.standing.take_up(entry, state, self.is_member)
        self.actions.append(Applied(index, entry, state, self.is_contributor))

    def ask_again(self) -> None:
        """Ask to join, with a new request."""
        self.standing.ask_again()
        self.tell()

    def is_deposed(self, peer: int, ballot: Ballot) -> bool:
        """Return whether a ballot is lower than what is promised, and tell who uses it (S1)."""
        if ballot < self.promised:
            self.send(peer, Refusal(self.promised))
            return True
        return False

    def follow(self, ballot: Ballot) -> None:
        """Take a coordinator's ballot: nothing of a lower one from here on."""
        self.promised, self.is_leading = ballot, False

    def take_append(self, append: Append) -> None:
        """Take up entries of the coordinator that is followed."""
        is_joined = append.ballot == self.accepted or not self.standing.request
        if append.start <= (self.log.end if is_joined else self.state.index):
            self.silence = 0  # beyond that there is no following, only joining again
        if append.ballot == self.accepted:
            if append.start <= self.log.end:
                self.log.extend(append.start, append.entries)
        elif self.log.base <= append.start <= self.state.index:  # S4
            self.log = self.log.joined(append.start, append.entries)
            self.accepted = append.ballot
        if append.ballot == self.accepted:
            while self.state.index < min(append.index, self.log.end):
                self.apply_next()
            self.floor = max(self.floor, append.floor)
            self.log.cut(min(self.floor, self.state.index))
        self.tell()

    def take_install(self, peer: int, install: Install) -> None:
        """Start from the log's state at this cluster's request; 0: as a voter who fell behind.

        With it comes the rest of the log, as with any first append under a ballot (S4).
        """
        standing, request = self.standing, install.request
        is_of_own = install.ballot.branch == self.branch  # else it has no log (branches.py)
        if is_of_own and self.is_deposed(peer, install.ballot):
            return
        if install.state.index < self.state.index:
            return
        if request and (request != standing.request or request == standing.answered):
            return
        if not request and install.ballot == self.accepted and install.state.index <= self.log.end:
            return
        self.follow(install.ballot)
        self.accepted, self.silence = install.ballot, 0
        self.state, self.log = install.state, Log(install.state.index, install.tail)
        standing.begin_copy(request)
        if request:
            self.actions.append(Copy(request, install.state))
            self.tell()
        else:
            self.be_dropped()

    def take_outside(self, message: Outside) -> None:
        """Join again if a view that is not older than the own has gone on without this cluster."""
        if message.ballot.branch != self.branch:
            if message.epoch > self.state.epoch:  # whoever has gone on since is a run of its own
                self.leave_branch(message.ballot.branch)
            return
        is_older = message.ballot < self.accepted or message.epoch < self.state.epoch
        if not is_older and not self.is_leading and not self.standing.request:
            self.be_dropped()

    def leave_branch(self, branch: int) -> None:
        """Begin with nothing in another branch; what was promised in the own one is never broken,
        as nothing of that is followed or answered from here on.
        """
        self.promised = self.accepted = Ballot(branch=branch)
        self.state, self.log, self.out = State(), Log(), frozenset()
        self.is_leading, self.floor = False, 0
        self.be_dropped()

    def be_dropped(self) -> None:
        """Throw away what is under way, and join again."""
        self.standing.lose()
        self.actions.append(Dropped())
        self.ask_again()
