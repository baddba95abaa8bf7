"""Which cluster was lost first: one that ends because it lost another says which before it leaves.

A survivor that ends closes its connections, and whoever looks next would name it for the one that
was lost. So every rank has a receive posted from each peer from the start on, over the handshake's
connections: what a peer says in leaving lies here whenever this rank comes to look, even if the
rendezvous store went with its host. Ranks of one cluster tell each other over their own store, as
the peer of one may have been ended by its launcher, without a word.

One that ends because it was told to (`core/leaving.py`) says so, too, long before it leaves; and a
second word once it has saved. Neither takes the training thread: whoever asks looks at what lies
here.

Looking takes up to `_GRACE_SECONDS`, on the transfer's thread: what was said may still be on its
way when another connection has closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.core.leaving import Reason
from dsx.core.membership import Seat

_GRACE_SECONDS = 1.0
_SAY_SECONDS = 1.0  # for a word to go out, or gloo closes the connection before it has
_POLL_SECONDS = 0.02
_TAG = 0  # launches, whose handshakes share the group, count from 1
_NOTE = "lost first"
logger = logging.getLogger(__name__)


class Farewells:
    """What peers have said in leaving, and what this rank says; for one transport.

    `group` is the handshake's, None where there is no peer. `notes` is a key space of this
    cluster, where its ranks find what another of them has heard; None: there is only one rank.
    """

    def __init__(self, group: Any, seat: Seat, notes: dist.Store | None = None) -> None:
        self._group: Any = group
        self._seat = seat
        self._notes = notes
        self._lock = threading.Lock()
        self._hearing = threading.Lock()
        self._first: tuple[int, int] | None = None
        others = seat.others if group else []
        self._heard = {peer: torch.zeros(2, dtype=torch.int64) for peer in others}
        self._posted: list[Any] = []
        self._last_word: dict[int, Any] = {}  # what waits for each peer's next one
        self._second: dict[int, Tensor] = {}  # words of those that had said why they end
        self._said: list[Tensor] = []
        self._is_closed = False
        self._noted_reason: Reason | None = None
        self.gone: tuple[int, ...] = ()  # who is lost, where this cluster ends for that
        for peer in others:
            self._listen(peer, self._heard[peer])

    def first_lost(self, peer: int) -> tuple[int, int]:
        """Return the id of the cluster lost first, and of who said so, as `peer` is gone.

        Tells the others, who will find this cluster gone. Any thread; all get the same answer.
        After `close` nobody is looked for: it was this rank that has left.
        """
        if self._is_closed:
            return self._seat.ids[peer], self._seat.cluster_id
        with self._lock:
            if self._first is None:
                self._first = self._look(peer)
                if self.heard_reason() is None:
                    self._say(self._first[0] + 1)
        return self._first

    def heard_reason(self) -> Reason | None:
        """Return why a peer is about to end, if one has said so, or why this cluster has to.

        Does not wait; any thread.
        """
        said = {peer: _value(word) or 0 for peer, word in self._heard.items()}
        ending = [peer for peer, value in said.items() if value < 0]
        with self._hearing:
            for peer in ending:
                if peer not in self._second:
                    self._second[peer] = torch.zeros(2, dtype=torch.int64)
                    self._listen(peer, self._second[peer])
        return Reason.unpack(-said[ending[0]]) if ending else self._noted_reason

    def note_reason(self, reason: Reason, gone: tuple[int, ...]) -> None:
        """Have `heard_reason` tell why this cluster has to end, which no peer says."""
        self.gone, self._noted_reason = gone, reason

    def say_reason(self, reason: Reason) -> None:
        """Tell all peers why this cluster is about to end. Does not wait."""
        self._send(-reason.pack())

    def say_saved(self) -> None:
        """Tell all peers that this cluster has saved; after `say_reason`. Does not wait."""
        self._send(1)

    def have_saved(self) -> bool:
        """Whether all peers have said why they end, and that they have saved, or have gone.

        After `close` nobody is waited for.
        """
        self.heard_reason()
        return self._is_closed or all(
            (peer in self._second and _value(self._second[peer]) is not None)
            or self._has_gone(peer)
            for peer in self._heard
        )

    def close(self) -> None:
        """Let go of the connections."""
        self._is_closed = True
        self._group = None
        self._posted.clear()
        self._last_word.clear()

    def _look(self, peer: int) -> tuple[int, int]:
        own = self._seat.cluster_id
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until and not self._is_closed:
            for other in (peer, *self._heard):
                lost = _unpack(self._heard[other])
                if lost not in (None, own):
                    return self._note(lost), self._seat.ids[other]
            if self.heard_reason() is not None:
                return self._seat.ids[peer], own
            noted = self._noted()
            if noted is not None:
                return noted, own
            time.sleep(_POLL_SECONDS)
        return self._note(self._seat.ids[peer]), own

    def _listen(self, peer: int, word: Tensor) -> None:
        with suppress(RuntimeError, AttributeError):  # gone already: the first transfer says so
            self._last_word[peer] = self._group.recv([word], peer, _TAG)

    def _has_gone(self, peer: int) -> bool:
        """Whether nothing comes from a peer any more; gloo tells those alone who wait for it."""
        return getattr(self._last_word.get(peer), "has_failed", False)

    def _send(self, value: int) -> None:
        """Tell every peer; what is under way is kept here until it is there."""
        word = torch.tensor([value, ~value])
        self._said.append(word)
        for peer in self._heard:
            with suppress(RuntimeError, AttributeError):  # gone, or closed here
                self._posted.append(self._group.send([word], peer, _TAG))

    def _say(self, value: int) -> None:
        """Tell every peer that is left; those that are gone cannot be told."""
        group, word = self._group, torch.tensor([value, ~value])
        for peer in self._heard:
            with suppress(RuntimeError, AttributeError):  # gone, too, or closed here meanwhile
                group.send([word], peer, _TAG).wait(timedelta(seconds=_SAY_SECONDS))

    def _noted(self) -> int | None:
        if self._notes is None:
            return None
        notes = self._notes
        found = self._ask(lambda: notes.get(_NOTE) if notes.check([_NOTE]) else None)
        return None if found is None else int(found)

    def _note(self, lost: int) -> int:
        """Return what the first rank of this cluster to know has noted; `lost`, if this one is."""
        if self._notes is None:
            return lost
        notes = self._notes
        found = self._ask(lambda: notes.compare_set(_NOTE, "", str(lost)))
        return lost if found is None else int(found)

    def _ask(self, question: Callable[[], bytes | None]) -> bytes | None:
        """Return what the store of this cluster says; None, for good, if it is lost or silent."""
        asked: Future[bytes | None] = Future()

        def ask() -> None:
            try:
                asked.set_result(question())
            except RuntimeError as error:
                asked.set_exception(error)

        threading.Thread(target=ask, name="dsx-farewell-notes", daemon=True).start()
        try:
            return asked.result(_GRACE_SECONDS)
        except (RuntimeError, futures.TimeoutError) as error:
            told = str(error).splitlines() or [f"it is silent for {_GRACE_SECONDS:g} s"]
            logger.info("this cluster's store has ended: %s", told[0])
            self._notes = None
            return None


def _unpack(word: Tensor) -> int | None:
    """Return which cluster was said to be lost; None if none was."""
    value = _value(word)
    return value - 1 if value is not None and value > 0 else None


def _value(word: Tensor) -> int | None:
    """Return what was said; None if nothing has come, or not all of it."""
    value, check = word.tolist()
    return value if value == ~check else None
