"""A transport whose members may go: what is under way is averaged again by those who are left.

Beneath is one transport for each membership, made anew where that changes. A launch is committed
once every member has told every other one that it holds the same result (outer/commit.py). So when
a member is lost, those of the next membership tell each other which launch of each fragment they
have seen committed last. What one of them has, all have held, and take for committed; what none of
them has, nobody has applied: all give it up, undo what the attempt has changed, and make it again
from the same contribution. Whoever is not in the next membership goes on with nothing.

The training thread sees none of it: its wait lasts longer.

Where nobody says what the next membership is (`Views`), all that is under way fails by name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

from dsx.comm.farewell import Farewells
from dsx.comm.gloo import GlooTransport
from dsx.comm.launched import Launched
from dsx.comm.views import Views
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
        make: Callable[[Seat], GlooTransport],
        seat: Seat,
        views: Views,
        deadline_seconds: float,
        view_seconds: float,
        describe: Callable[[Submission], str] = str,
        speaks: bool = True,
    ) -> None:
        """`view_seconds`: how long after a loss the next membership may take to be known.

        `speaks`: whether this rank tells people of it.
        """
        self._make, self._views = make, views
        self._deadline_seconds, self._describe = deadline_seconds, describe
        self._view_seconds = min(view_seconds, deadline_seconds)
        self._level = logging.WARNING if speaks else logging.DEBUG
        self._members = make(seat)
        self._reopen: list[Callable[[Seat], object]] = []
        self._offered: Callable[[int], Sequence[Tensor]] | None = None
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)
        self._under_way: dict[int, Launched] = {}  # by number, in order
        self._committed: dict[int, int] = {}  # by fragment, the last launch
        self._era: object | None = object()  # of the members; None while they are agreed on
        self._lost: PeerLost | None = None  # since when there is trouble, and why
        self._lost_at = 0.0
        self._error: PeerLost | None = None
        self._sign = time.monotonic()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="dsx-views", daemon=True)
        self._thread.start()

    @property
    def seat(self) -> Seat:
        """This cluster among the members."""
        return self._members.seat

    @property
    def is_settled(self) -> bool:
        """Whether it is known who the members are; not while they agree on what is committed."""
        return self._era is not None

    @property
    def farewells(self) -> Farewells:
        """What members say in leaving."""
        return self._members.farewells

    def submit(
        self, what: Submission, exchange: Exchange, again: Callable[[], Exchange] | None = None
    ) -> Pending:
        """Start averaging; what cannot be made again is lost where the membership changes."""
        if again is None:
            return self._now().submit(what, exchange)
        launched = Launched(what, again, self._result, self._may_begin)
        with self._lock:
            if self._error is not None:
                launched.fail(self._error)
                return launched
            self._under_way[what.number] = launched
            if self._era is not None:
                self._start(launched, exchange)
        return launched

    def follow_views(self, reopen: Callable[[Seat], object]) -> None:
        """Have `reopen` called where the membership changes."""
        self._reopen.append(reopen)

    def spread(
        self,
        fragment: int,
        tensor: Tensor,
        chain: Sequence[int],
        moved: Callable[[int], None],
        index: int = -1,
    ) -> int:
        """As the members' transport does."""
        return self._now().spread(fragment, tensor, chain, moved, index)

    def gather(self, what: str, value: Any) -> Callable[[], Sequence[Any]]:
        """As the members' transport does."""
        return self._now().gather(what, value)

    def offer(self, shared: Callable[[int], Sequence[Tensor]]) -> None:
        """Nothing to do: every member is waited for."""

    def close(self) -> None:
        """Release threads and connections."""
        with self._lock:
            self._is_closed = True
        self._views.close()
        self._thread.join(2 * _LOOK_SECONDS)
        self._members.close()

    def _now(self) -> GlooTransport:
        """Return the members' transport, once it is known who they are."""
        with self._settled, waiting_for("the next membership", self._deadline_seconds):
            until = time.monotonic() + self._deadline_seconds
            while self._era is None and self._error is None and time.monotonic() < until:
                self._settled.wait(_LOOK_SECONDS)
            if self._error is not None:
                raise self._error
            if self._era is None:
                raise self._lost or PeerLost("the next membership is not known in time")
            return self._members

    def _result(self, launched: Launched) -> Tensor:
        label, began = self._describe(launched.what), time.monotonic()
        with waiting_for(label, self._deadline_seconds):
            while not launched.future.done():
                futures.wait([launched.future], _LOOK_SECONDS)
                sign = max(self._sign, self._members.last_sign, began)
                limit = self._deadline_seconds + SLACK_SECONDS
                if time.monotonic() > sign + limit and not launched.future.done():
                    raise PeerLost(
                        f"{label}: nothing has moved for {limit:g} s (clusters.deadline_seconds "
                        f"and {SLACK_SECONDS:g}), so it is given up"
                    )
        return launched.future.result()

    def _may_begin(self, launched: Launched) -> bool:
        """Whether no launch of the fragment before this one is under way; on its thread."""
        what = launched.what
        with self._lock:
            before = [n for n, other in self._under_way.items() if n < what.number
                      and other.what.fragment == what.fragment]  # fmt: skip
        return not before

    def _start(self, launched: Launched, exchange: Exchange) -> None:
        """Make an attempt, with the lock."""
        pending = self._members.submit(launched.what, launched.attempt(exchange, self.seat))
        launched.inner = pending
        pending.future.add_done_callback(partial(self._ended, launched, self._era))

    def _ended(self, launched: Launched, era: object, future: Future[Tensor]) -> None:
        """Take the end of an attempt, on the fragment's thread."""
        self._sign = time.monotonic()
        with self._lock:
            if era is not self._era:
                return  # it is looked at where the members are agreed on
            error = future.exception()
            if error is None:
                self._commit(launched, future.result())
            elif isinstance(error, PeerLost) and not isinstance(error, PeerPreempted):
                launched.error = error
                self._note_loss(error)
            else:
                self._under_way.pop(launched.what.number, None)
                launched.fail(error if isinstance(error, Exception) else RuntimeError(error))

    def _commit(self, launched: Launched, mean: Tensor | None) -> None:
        """Note a commit, with the lock; `mean` is None if whoever waits has it."""
        what = launched.what
        self._committed[what.fragment] = max(self._committed.get(what.fragment, 0), what.number)
        self._under_way.pop(what.number, None)
        if mean is not None:
            launched.end(mean)

    def _note_loss(self, error: PeerLost) -> None:
        if self._lost is None:
            self._lost, self._lost_at = error, time.monotonic()
        self._views.report(error)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                membership = self._views.next(self.seat.membership.epoch, _LOOK_SECONDS)
                if self._is_closed:
                    return
                while membership is not None:
                    membership = self._regroup(membership)
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
            for launched in [*self._under_way.values()]:
                lost = launched.error
                told = error if lost is None or isinstance(error, PeerPreempted) else lost
                launched.fail(told)
            self._under_way.clear()
            self._settled.notify_all()
        if isinstance(error, PeerPreempted):
            self.farewells.note_reason(error.reason, error.gone)

    def _regroup(self, membership: Membership) -> Membership | None:
        """Go on under another membership; nothing goes on yet if not all of it come.

        Returns a later one that is known by then.
        """
        began, before = time.monotonic(), self.seat
        with self._lock:
            self._era, self._lost_at = None, began
        old = self._members
        if before.cluster_id not in membership.ids:
            raise PeerLost(
                f"the others have gone on without cluster {before.cluster_id} (view "
                f"{membership.epoch}: {_names(membership.ids)}): it has to join them again, from "
                "a checkpoint"
            )
        old.abort()
        with self._lock:
            for launched in [*self._under_way.values()]:
                inner = launched.inner
                if inner is not None and inner.has_arrived:
                    self._commit(launched, inner.wait())
        self._members = self._make(before.under(membership))
        tops = self._agree_on_commits(membership)
        if tops is None or isinstance(tops, Membership):
            return tops  # None: another view follows
        with self._lock:
            for number, launched in [*self._under_way.items()]:
                fragment = launched.what.fragment
                if number <= tops.get(fragment, 0):
                    if not launched.commit():
                        raise PeerLost(
                            f"{self._describe(launched.what)}: another cluster has applied a mean "
                            "that this one does not hold; resume from the last checkpoint"
                        )
                    self._commit(launched, None)
                else:
                    launched.give_up()
        for reopen in self._reopen:
            reopen(self.seat)
        with self._settled:
            self._era, self._lost = object(), None
            again = [*self._under_way.values()]
            for launched in again:
                self._start(launched, launched.again())
            self._settled.notify_all()
        self._sign = time.monotonic()
        gone = [id for id in before.ids if id not in membership.ids]
        logger.log(
            self._level, "%s: going on with %s (view %d), %d transfer(s) are averaged again; "
            "this took %.2f s", _how_gone(gone, membership.left), _names(membership.ids),
            membership.epoch, len(again), time.monotonic() - began,
        )  # fmt: skip
        return None

    def _agree_on_commits(self, membership: Membership) -> dict[int, int] | Membership | None:
        """Return the last launch of each fragment that any member knows to be committed.

        None if a member is lost before it has told, or a later view, for which others may have
        left this one, or never have been in it.
        """
        what = f"what was committed before view {membership.epoch}"
        wait = self._members.gather(what, [*self._committed.items()])
        told: Future[Sequence[Any]] = Future()

        def await_all() -> None:
            try:
                told.set_result(wait())
            except Exception as error:
                told.set_exception(error)

        threading.Thread(target=await_all, name="dsx-view", daemon=True).start()
        while not told.done():
            futures.wait([told], _LOOK_SECONDS / 10)
            later = self._views.next(membership.epoch, _LOOK_SECONDS / 10)
            if later is not None:
                return later
        try:
            everyone = told.result()
        except PeerLost as error:
            self._note_loss(error)
            return None
        tops: dict[int, int] = {}
        for fragment, number in (pair for each in everyone for pair in each):
            tops[fragment] = max(tops.get(fragment, 0), number)
        return tops


def _names(ids: Sequence[int]) -> str:
    return f"cluster{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def _how_gone(gone: Sequence[int], left: Sequence[int]) -> str:
    lost, left = [id for id in gone if id not in left], [id for id in gone if id in left]
    told = [f"{_names(lost)} {'are' if len(lost) > 1 else 'is'} lost"] if lost else []
    told += [f"{_names(left)} {'have' if len(left) > 1 else 'has'} left"] if left else []
    return ", ".join(told) or "nobody is lost"
