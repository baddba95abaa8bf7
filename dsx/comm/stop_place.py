"""At which step boundary the ranks of a cluster stop, where they were told to at any moment.

All of them stop at the same one, without a wait for the store on the training thread, and, but for
pipelines, without a collective per step. Asked for a stop, each says which boundary is the first
that it has not left, and holds there; the last of these is where all stop. The saying is done by a
thread of its own, so that ranks which wait for each other, in a collective or a pipeline, cannot
keep each other from answering.

A rank that waits at a boundary for a transfer can stop right there: the transfer is put off, by all
ranks of its stage (outer/deferral.py), no rank of another stage goes on, and whoever goes on from
the checkpoint applies it first.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as NotYet
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from dsx.core.leaving import Reason
from dsx.core.transport import PeerLost, PeerPreempted, Pending
from dsx.core.waits import waiting_for

_ASKED, _AGREED, _PLACE = "asked", "agreed", "place"


class StopPlace:
    """One rank's part; `store` is a key space of the cluster's, None where there is one rank.

    `may_receive` and `may_leave` are the training thread's, `look` and `agree` another one's.
    """

    def __init__(
        self, store: Any, rank: int, num_ranks: int, deadline_seconds: float, number: int = 0
    ) -> None:
        """`number`: which stop of the process, as one that has waited for others may go on."""
        self._store = store
        self._asked_key, self._agreed_key = f"{number}/{_ASKED}", f"{number}/{_AGREED}"
        self._place_key = f"{number}/{_PLACE}"
        self._rank, self._num_ranks = rank, num_ranks
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._step = 1  # of the first boundary that this rank has not left
        self._is_said = False  # from then on it is not left without an agreement
        self._asked: Future[Reason] = Future()
        self._agreed: Future[int] = Future()

    @property
    def reason(self) -> Reason | None:
        """Why this cluster is to stop, if it is."""
        return self._asked.result() if self._asked.done() else None

    def ask(self, reason: Reason) -> None:
        """Ask for a stop; any thread, but no signal handler. The first reason counts."""
        with self._lock:
            if not self._asked.done():
                self._asked.set_result(reason)

    def is_asked_within(self, seconds: float, unless: Future[None]) -> bool:
        """Wait for so long at most until a stop is asked for, or something is; whether it is."""
        either: list[Future[Any]] = [self._asked, unless]
        wait(either, seconds, FIRST_COMPLETED)
        return self._asked.done()

    def begin(self, step: int) -> None:
        """Enter the boundary of a step, which need not follow the one before: after a resume."""
        with self._lock:
            self._step = step

    def may_receive(self, pending: Pending) -> bool:
        """Wait for a ripe transfer; False if a stop is asked for meanwhile, and it is not there.

        One that has failed may be received, too, for its error to be raised; unless it failed
        because a peer was told to end, and has left.
        """
        return pending.wait_unless(self._asked) and not self._was_left(pending)

    def may_leave(self, has_put_off: bool = False) -> bool:
        """Whether training goes on after this boundary.

        `has_put_off`: a rank of the cluster has been asked for a stop, and left a transfer here.
        """
        with self._lock:
            if not (self._is_said or has_put_off):
                self._step += 1
                return True
        if self._wait_for_agreement() <= self._step:
            return False
        self._step += 1
        return True

    def _was_left(self, pending: Pending) -> bool:
        """Whether a transfer that has ended failed because of a stop, which is then asked for."""
        try:
            pending.wait()
        except PeerPreempted as left:
            self.ask(left.reason)
            return True
        except PeerLost:
            return self._asked.done()
        return False

    def _wait_for_agreement(self) -> int:
        try:
            with waiting_for("where all ranks of this cluster stop", self._deadline_seconds):
                return self._agreed.result(self._deadline_seconds)
        except NotYet:
            raise RuntimeError(self._explain()) from None

    def look(self) -> None:
        """Hear whether another rank of the cluster asks for a stop; RuntimeError from the store."""
        if (
            self._store is not None
            and not self._asked.done()
            and self._store.check([self._asked_key])
        ):
            self.ask(Reason(**json.loads(self._store.get(self._asked_key))))

    def agree(self) -> int:
        """Say where this rank can stop, and return where all do: a step. Waits for the others."""
        assert self._asked.done()
        with self._lock:
            self._is_said = True
            own = self._step
        try:
            agreed = self._agree_on(own)
        except RuntimeError as error:
            told = f"{self._explain()} ({str(error).splitlines()[0]})"
            self._agreed.set_exception(RuntimeError(told))
            raise RuntimeError(told) from error
        self._agreed.set_result(agreed)
        return agreed

    def _agree_on(self, own: int) -> int:
        store, deadline = self._store, timedelta(seconds=self._deadline_seconds)
        if store is None:
            return own
        store.compare_set(self._asked_key, "", json.dumps(asdict(self._asked.result())))
        store.set(f"{self._place_key}/{self._rank}", json.dumps(own))
        if self._rank == 0:
            names = [f"{self._place_key}/{rank}" for rank in range(self._num_ranks)]
            with waiting_for("where each rank can stop", self._deadline_seconds):
                store.wait(names, deadline)
            last = max(json.loads(store.get(name)) for name in names)
            store.set(self._agreed_key, json.dumps(last))
        with waiting_for("rank 0, which says where all stop", self._deadline_seconds):
            store.wait([self._agreed_key], deadline)
        return json.loads(store.get(self._agreed_key))

    def _explain(self) -> str:
        reason = self._asked.result()
        return (
            f"{reason.sentence}, but the ranks of this cluster have not all said within "
            f"{self._deadline_seconds:g} s (clusters.grace_seconds) at which step they can stop: "
            "nothing is saved; resume from the last checkpoint"
        )
