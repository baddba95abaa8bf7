"""Who averages which launches, by their numbers: one span of launches after another.

A cluster that comes in has its part from one launch on, which all members agree on: the first that
none of them had submitted. Those before it are averaged by the members of before, also later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dsx.core.membership import Membership, Seat

if TYPE_CHECKING:
    from dsx.comm.gloo import GlooTransport

Mark = tuple[int, int]  # a member: its id, and which process of the cluster it is


def marks_of(membership: Membership) -> frozenset[Mark]:
    """Return the members: a cluster that has come back is another one."""
    return frozenset((member.id, member.process) for member in membership.members)


@dataclass
class Span:
    """Launches from `first` on, averaged over one transport.

    `follows`: by others alone; this cluster takes what they have averaged. `begun` are the
    fragments of which a launch of the span has been committed: all members have then ended those of
    the span before.
    """

    first: int
    members: GlooTransport
    follows: bool = False
    begun: set[int] = field(default_factory=set[int])

    @property
    def seat(self) -> Seat:
        """This cluster among those who average."""
        return self.members.seat

    @property
    def marks(self) -> frozenset[Mark]:
        """Who averages."""
        return marks_of(self.seat.membership)


def at(spans: Sequence[Span], number: int) -> Span:
    """Return the span of a launch, the last that begins by then."""
    return [span for span in spans if span.first <= number][-1]


def told_of(spans: Iterable[Span], last: int, lowest: int, is_stale: bool) -> dict[str, Any]:
    """Return what a member tells of itself, as JSON values.

    `last` is the last launch submitted and `lowest` the first that is not committed. `is_stale`: it
    has lost one of those that it averages with.
    """
    own = [[span.first, sorted(span.marks)] for span in spans if not span.follows]
    return {"spans": own, "last": last, "lowest": lowest, "is_stale": is_stale}


def plan_spans(
    told: Sequence[Mapping[str, Any]], membership: Membership
) -> list[tuple[int, frozenset[Mark]]]:
    """Return the first launch of each span and who averages it, from what all members have told.

    Who is in the membership and in no span yet has its part from the first launch that nobody has
    submitted. What is over for all is left out.
    """
    view = marks_of(membership)
    known: dict[int, frozenset[Mark]] = {}
    for one in told:
        for first, marks in one["spans"]:
            here = frozenset((id, process) for id, process in marks) & view
            known[first] = known.get(first, frozenset()) | here
    if not known or known[max(known)] != view:
        known[1 + max(one["last"] for one in told)] = view
    firsts, over = sorted(known), min(one["lowest"] for one in told)
    while len(firsts) > 1 and firsts[1] <= over:
        del firsts[0]
    planned: list[tuple[int, frozenset[Mark]]] = []
    for first in firsts:
        if not planned or planned[-1][1] != known[first]:
            planned.append((first, known[first]))
    return planned


def must_begin_again(
    told: Sequence[Mapping[str, Any]],
    planned: Sequence[tuple[int, frozenset[Mark]]],
    membership: Membership,
) -> bool:
    """Whether all give up what is under way: a member has lost another one, or lacks a span."""
    if any(one["is_stale"] for one in told):
        return True
    for member, one in zip(membership.members, told, strict=True):
        known = {first for first, _ in one["spans"]}
        is_new = not known  # it joins
        for first, marks in planned:
            is_old = any(first == f for other in told for f, _ in other["spans"])
            is_in = (member.id, member.process) in marks
            if is_in and is_old and not is_new and first not in known:
                return True
    return False


def connect_spans(
    planned: Sequence[tuple[int, frozenset[Mark]]],
    membership: Membership,
    made: GlooTransport,
    make: Callable[[Seat, str], GlooTransport],
    followed: Sequence[Span],
) -> list[Span]:
    """Return a member's spans with new connections; the last one's are `made`, of all members.

    What it follows stays as it is.
    """
    spans = [*followed]
    own = membership.members[membership.position_of(made.seat.cluster_id)]
    for place, (first, marks) in enumerate(planned):
        if place == len(planned) - 1:
            spans.append(Span(first if spans else 0, made))
        elif (own.id, own.process) in marks:
            members = tuple(m for m in membership.members if (m.id, m.process) in marks)
            seat = made.seat.under(replace(membership, members=members))
            spans.append(Span(first if spans else 0, make(seat, f"/from_{first}")))
    return spans
