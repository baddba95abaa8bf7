"""What the members of a membership tell each other before anything goes on under it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dsx.comm.spans import marks_of
from dsx.comm.views import Views
from dsx.core.membership import Membership
from dsx.core.transport import PeerLost

if TYPE_CHECKING:
    from dsx.comm.gloo import GlooTransport

_LOOK_SECONDS = 0.05
logger = logging.getLogger("dsx.comm.elastic")


def hear(
    members: GlooTransport, what: str, value: Any, views: Views
) -> list[Any] | Membership | PeerLost:
    """Tell all members a JSON value and return theirs, by position.

    PeerLost if one is lost before it has told, or a later membership, for which others may have
    left this one, or never have been in it.
    """
    wait = members.gather(what, value)
    told: Future[Sequence[Any]] = Future()

    def await_all() -> None:
        try:
            told.set_result(wait())
        except Exception as error:
            told.set_exception(error)

    threading.Thread(target=await_all, name="dsx-view", daemon=True).start()
    epoch = members.seat.membership.epoch
    while not told.done():
        futures.wait([told], _LOOK_SECONDS)
        later = views.next(epoch, _LOOK_SECONDS)
        if later is not None:
            return later
    try:
        return list(told.result())
    except PeerLost as error:
        return error


def tell_of_change(
    level: int, before: Membership, now: Membership, again: int | None, seconds: float
) -> None:
    """Log who is lost and who is back; `again`: how many transfers are averaged again, if any."""
    gone = sorted(id for id, _ in marks_of(before) - marks_of(now))
    come = sorted(id for id, _ in marks_of(now) - marks_of(before))
    if gone or again is not None:
        logger.log(
            level, "%s: going on with %s (view %d), %d transfer(s) are averaged again; this took "
            "%.2f s", _how_gone(gone, now.left), names(now.ids), now.epoch, again or 0, seconds,
        )  # fmt: skip
    if come:
        logger.log(
            level, "%s back: going on with %s (view %d)", _are(come), names(now.ids), now.epoch
        )


def names(ids: Sequence[int]) -> str:
    """Return what messages call some clusters."""
    return f"cluster{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def _are(ids: Sequence[int]) -> str:
    return f"{names(ids)} {'are' if len(ids) > 1 else 'is'}"


def _how_gone(gone: Sequence[int], left: Sequence[int]) -> str:
    lost, left = [id for id in gone if id not in left], [id for id in gone if id in left]
    told = [f"{_are(lost)} lost"] if lost else []
    told += [f"{names(left)} {'have' if len(left) > 1 else 'has'} left"] if left else []
    return ", ".join(told) or "nobody is lost"
