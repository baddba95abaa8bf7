"""A view that an operator has forced: its log is a branch of its own, and none takes anything of
another one's (S10).

Whoever is left of a view that has lost its quorum goes on without clusters of which an operator
says that they do not. If they do, there are two runs from then on, and what this file keeps is that
they never mix: every ballot is of a branch, and so is every message that one has anything to do
with. Who was left out, and has not gone on by itself, is told so, and joins as any joiner does.
"""  # fmt: skip

from __future__ import annotations

from collections.abc import Collection

from dsx.comm.membership.entries import Contributors
from dsx.comm.membership.messages import (
    Append,
    AskForLogs,
    Install,
    Message,
    NoLog,
    Outside,
    Prepare,
    Refusal,
    Status,
)
from dsx.comm.membership.quorum import is_quorum
from dsx.comm.membership.replica import Replica


def branch_of(message: Message) -> int | None:
    """Return the branch that a message is of; None of what is asked before there is a log."""
    if isinstance(message, AskForLogs | NoLog):
        return None
    if isinstance(message, Status):
        return message.accepted.branch
    return (message.promised if isinstance(message, Refusal) else message.ballot).branch


def may_follow(replica: Replica, message: Message) -> bool:
    """Return whether a message is of this cluster's branch, or for one of any.

    Those are the request of one who has no log, the copy that it gets, and the word that a forced
    view has left this cluster out.
    """
    branch = branch_of(message)
    if branch is None or branch == replica.branch or isinstance(message, Outside):
        return True
    if isinstance(message, Status):
        return message.request > 0 and not message.length
    return isinstance(message, Install) and message.request > 0 and not replica.log.end


def outside_of_branch(replica: Replica, message: Message) -> Outside | None:
    """Return what is told to one who takes part in another branch."""
    if isinstance(message, Append | Prepare | Status) and replica.is_leading:
        return Outside(replica.accepted, replica.state.forced_at)
    return None


def forceable(replica: Replica, without: Collection[int], branch: int) -> Contributors:
    """Return the processes that are to be left out; ValueError where that is not to be forced."""
    view, here = replica.state.contributors, replica.here
    ids, me = [c.id for c in view], replica.me.id
    told = f"view {replica.state.epoch} of clusters {', '.join(map(str, ids))}"
    if not replica.is_contributor:
        raise ValueError(f"cluster {me} does not contribute to {told}")
    if replica.has_quorum_of_all:
        raise ValueError(f"nothing is to be forced: enough clusters of {told} are reached")
    if unknown := sorted({*without} - {*ids}):
        raise ValueError(f"clusters {unknown} are not in {told}")
    out = tuple(c for c in view if c.id in without)
    if me in without or not out:
        raise ValueError(f"name those of {told} that are lost, and not this one, cluster {me}")
    if reached := [c.id for c in out if here.get(c.id) == c.incarnation]:
        raise ValueError(f"cluster(s) {', '.join(map(str, reached))} are reached from cluster {me}")
    processes = frozenset((c.id, c.incarnation) for c in out)
    if not is_quorum(view, here, replica.newest, replica.arbiter, processes):
        away = [c.id for c in view if here.get(c.id) != c.incarnation and c not in out]
        raise ValueError(
            f"without those, too few are reached still: cluster(s) {', '.join(map(str, away))} "
            "are lost, too; leave them out as well, or wait for them"
        )
    if branch <= replica.branch:
        raise ValueError(f"branch {branch} is not later than {replica.branch}, the last one forced")
    return out
