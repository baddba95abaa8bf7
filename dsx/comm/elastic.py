"""A transport whose members may go: what is under way is averaged again by those who are left.

Beneath is one transport for each membership, made anew where that changes. A launch is committed
once every member has told every other one that it holds the same result (outer/commit.py). So when
a member is lost, those of the next membership tell each other which launch of each fragment they
have seen committed last. What one of them has, all have held, and take for committed; what none of
them has, nobody has applied: all give it up, undo what the attempt has changed, and make it again
from the same contribution. Whoever is not in the next membership goes on with nothing.

Where a cluster comes in, nothing is given up: it has its part from the first launch on that nobody
has submitted (spans.py), and those before it go on among the members of before.

The training thread sees none of it: its wait lasts longer.

Where nobody says what the next membership is (`Views`), all that is under way fails by name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from torch import Tensor

from dsx.comm.agreeing import hear, names, tell_of_change
from dsx.comm.farewell import Farewells
from dsx.comm.gloo import GlooTransport
from dsx.comm.launched import Launched
from dsx.comm.spans import (
    Mark,
    Span,
    at,
    connect_spans,
    marks_of,
    must_begin_again,
    plan_spans,
    told_of,
)
from dsx.comm.under_way import UnderWay
from dsx.comm.views import Views
from dsx.core.at_exit import close_at_exit, has_closed
from dsx.core.exchange import Exchange
from dsx.core.fifo import SLACK_SECONDS
from dsx.core.membership import Membership, Seat
from dsx.core.transport import PeerLost, PeerPreempted, Pending, Submission
from dsx.core.waits import waiting_for

_LOOK_SECONDS = 0.5
logger = logging.getLogger(__name__)


class ElasticTransport:
    """Averages between the members of the view in force; `make` connects those of one."""

    def __init__(
        self,
        make: Callable[[Seat, str], GlooTransport],
        seat: Seat,
        views: Views,
        deadline_seconds: float,
        view_seconds: float,
        describe: Callable[[Submission], str] = str,
        speaks: bool = True,
        follows: bool = False,
    ) -> None:
        """`make` names a transport by the seat's epoch and what else tells it from others.

        `view_seconds`: how long after a loss the next membership may take to be known. `speaks`:
        whether this rank tells people of it. `follows`: this cluster, alone in `seat`, is about to
        join others, and takes what they average until it has its part.
        """
        self._make, self._views = make, views
        self._deadline_seconds, self._describe = deadline_seconds, describe
        self._view_seconds = min(view_seconds, deadline_seconds)
        self._level = logging.WARNING if speaks else logging.DEBUG
        span = Span(0, make(seat, ""), follows)
        self._under_way = UnderWay(span, self._note_loss)
        self._lock = self._under_way.lock
        self._settled = threading.Condition(self._lock)
        self._epoch = seat.membership.epoch  # of the last membership that all have agreed on
        self._is_stale = False  # what was under way has been given up, and not begun again
        self._lost: PeerLost | None = None  # since when there is trouble, and why
        self._lost_at = 0.0
        self._error: PeerLost | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="dsx-views", daemon=True)
        self._thread.start()
        close_at_exit(self)

    @property
    def seat(self) -> Seat:
        """This cluster among the members, as of the last launch submitted."""
        return self._now_span.seat

    @property
    def is_settled(self) -> bool:
        """Whether it is known who the members are; not while they agree on what is committed."""
        return self._under_way.era is not None and self._under_way.told_last is None

    @property
    def farewells(self) -> Farewells:
        """What members say in leaving."""
        return self._under_way.spans[-1].members.farewells

    @property
    def first_own(self) -> int | None:
        """The first launch in which this cluster has its part; None if that is not known yet."""
        return next((span.first for span in self._under_way.spans if not span.follows), None)

    def submit(
        self, what: Submission, exchange: Exchange, again: Callable[[], Exchange] | None = None
    ) -> Pending:
        """Start averaging; what cannot be made again is lost where the membership changes."""
        if again is None:
            span = self._known_span()
            prepared = self._under_way.prepared(span, what.fragment, exchange)
            return span.members.submit(what, prepared)
        launched = Launched(what, again, self._result, self._under_way.may_begin)
        with self._lock:
            if self._error is not None:
                launched.fail(self._error)
                return launched
            self._under_way.add(launched, exchange)
        return launched

    def give_sign(self) -> None:
        """Tell that what this cluster follows goes on."""
        self._under_way.sign = time.monotonic()

    def follow_views(self, reopen: Callable[[Seat, int | None], object]) -> None:
        """Have `reopen` called where the membership changes, for a fragment, or for all."""
        self._under_way.reopen.append(reopen)

    def spread(
        self,
        fragment: int,
        tensor: Tensor,
        chain: Sequence[int],
        moved: Callable[[int], None],
        index: int = -1,
    ) -> int:
        """As the members' transport does."""
        return self._known_span().members.spread(fragment, tensor, chain, moved, index)

    def gather(self, what: str, value: Any) -> Callable[[], Sequence[Any]]:
        """As the members' transport does."""
        return self._known_span().members.gather(what, value)

    def offer(self, shared: Callable[[int], Sequence[Tensor]]) -> None:
        """Nothing to do: every member is waited for."""

    def close(self) -> None:
        """Release threads and connections."""
        has_closed(self)
        with self._lock:
            self._is_closed = True
        self._views.close()
        self._thread.join(2 * _LOOK_SECONDS)
        for span in self._under_way.spans:
            span.members.close()

    @property
    def _now_span(self) -> Span:
        """The span of the last launch submitted."""
        return at(self._under_way.spans, self._under_way.last)

    def _known_span(self) -> Span:
        """Return whom all that is no launch concerns, once it is known who they are.

        They are those of the last launch submitted: the same in all clusters, where all call it at
        one place of the program.
        """
        with self._settled, waiting_for("the next membership", self._deadline_seconds):
            until = time.monotonic() + self._deadline_seconds
            while not self._under_way.is_known and not self._error and time.monotonic() < until:
                self._settled.wait(_LOOK_SECONDS)
                if self._views.waits:
                    until = time.monotonic() + self._deadline_seconds
            if self._error is not None:
                raise self._error
            if not self._under_way.is_known:
                raise self._lost or PeerLost("the next membership is not known in time")
            return self._now_span

    def _result(self, launched: Launched) -> Tensor:
        label, began = self._describe(launched.what), time.monotonic()
        with waiting_for(label, self._deadline_seconds):
            while not launched.future.done():
                futures.wait([launched.future], _LOOK_SECONDS)
                signs = [span.members.last_sign for span in [*self._under_way.spans]]
                limit = self._deadline_seconds + SLACK_SECONDS
                if self._views.waits:
                    self.give_sign()
                is_late = time.monotonic() > max(self._under_way.sign, *signs, began) + limit
                if is_late and not launched.future.done():
                    raise PeerLost(
                        f"{label}: nothing has moved for {limit:g} s (clusters.deadline_seconds "
                        f"and {SLACK_SECONDS:g}), so it is given up"
                    )
        return launched.future.result()

    def _note_loss(self, error: PeerLost) -> None:
        if self._lost is None:
            self._lost, self._lost_at = error, time.monotonic()
        self._views.report(error)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                membership = self._views.next(self._epoch, _LOOK_SECONDS)
                if self._is_closed:
                    return
                while membership is not None:
                    membership = self._regroup(membership)
                if self._views.waits:  # for who is lost, or an order to go on without
                    self._lost_at = time.monotonic()
                    self.give_sign()
                if (over := self._under_way.take_what_is_over()) is not None:
                    over.members.close()
                if self._lost and time.monotonic() > self._lost_at + self._view_seconds:
                    raise self._lost
            except PeerLost as error:
                return self._fail(error)
            except Exception as error:
                logger.exception("the thread that follows the membership has ended by an error")
                return self._fail(PeerLost(f"the membership cannot be followed: {error}"))

    def _fail(self, error: PeerLost) -> None:
        """End all that is under way, and all that will be."""
        with self._settled:
            self._error = error
            self._under_way.fail(error)
            self._settled.notify_all()
        if isinstance(error, PeerPreempted):
            self.farewells.note_reason(error.reason, error.gone)

    def _regroup(self, membership: Membership) -> Membership | None:
        """Go on under another membership; no launch goes on that not all of it know of.

        Returns a later one that is known by then.
        """
        under_way = self._under_way
        began, before = time.monotonic(), under_way.spans[-1].seat
        if before.cluster_id not in membership.ids:
            raise PeerLost(
                f"the others have gone on without cluster {before.cluster_id} (view "
                f"{membership.epoch}: {names(membership.ids)}): it has to join them again, from "
                "a checkpoint"
            )
        with self._lock:
            self._lost_at = began
            under_way.told_last = last = under_way.last
            lowest = min(under_way.own(), default=last + 1)
            view = marks_of(membership)
            is_stale = self._is_stale or any(
                not span.follows and not span.marks <= view for span in under_way.spans
            )
        made = self._make(before.under(membership), "")
        here = told_of(under_way.spans, last, lowest, is_stale)
        told = self._hear(made, f"who averages from where in view {membership.epoch}", here)
        again: int | None = None
        if isinstance(told, list):
            planned = plan_spans(told, membership)
            if must_begin_again(told, planned, membership):
                told = self._begin_again(made, membership, planned)
                again = told if isinstance(told, int) else None
            elif planned[-1][1] != marks_of(before.membership):
                with self._lock:
                    under_way.spans.append(Span(planned[-1][0], made))
            else:
                made.close()
        if told is None or isinstance(told, Membership):
            made.abort()
            return told  # None: another view follows
        with self._settled:
            self._epoch = membership.epoch
            under_way.era, under_way.told_last = under_way.era or object(), None
            self._lost = None
            under_way.start_due()
            self._settled.notify_all()
        under_way.sign = time.monotonic()
        if not under_way.spans[0].follows:
            tell_of_change(
                self._level, before.membership, membership, again, time.monotonic() - began
            )
        return None

    def _begin_again(
        self,
        made: GlooTransport,
        membership: Membership,
        planned: Sequence[tuple[int, frozenset[Mark]]],
    ) -> int | Membership | None:
        """Give all up, commit what any member knows to be committed, make the rest again.

        Returns how much that is; or as `_hear`.
        """
        under_way = self._under_way
        with self._lock:
            under_way.era, self._is_stale = None, True
        for span in under_way.spans:
            if not span.follows:
                span.members.abort()
        with self._lock:
            for launched in [*under_way.launches.values()]:
                inner = launched.inner
                if inner is not None and inner.has_arrived:
                    under_way.commit(launched, inner.wait())
        what = f"what was committed before view {membership.epoch}"
        told = self._hear(made, what, [*under_way.committed.items()])
        if not isinstance(told, list):
            return told
        tops: dict[int, int] = {}
        for fragment, number in (pair for each in told for pair in each):
            tops[fragment] = max(tops.get(fragment, 0), number)
        with self._lock:
            own = under_way.own()
            for number in own:
                launched = under_way.launches[number]
                if number <= tops.get(launched.what.fragment, 0):
                    if not launched.commit():
                        raise PeerLost(
                            f"{self._describe(launched.what)}: another cluster has applied a mean "
                            "that this one does not hold; resume from the last checkpoint"
                        )
                    under_way.commit(launched, None)
                else:
                    launched.give_up()
            followed = [span for span in under_way.spans if span.follows]
            spans = connect_spans(planned, membership, made, self._make, followed)
            under_way.spans = spans
            for reopen in under_way.reopen if not spans[0].follows else ():
                reopen(spans[0].seat, None)
            self._is_stale = False
        return sum(number in under_way.launches for number in own)

    def _hear(self, made: GlooTransport, what: str, value: Any) -> list[Any] | Membership | None:
        """Return what all members tell; None, or a later membership, if they do not."""
        heard = hear(made, what, value, self._views)
        if isinstance(heard, PeerLost):
            self._note_loss(heard)
            return None
        return heard
