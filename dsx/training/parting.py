"""How a cluster that has saved goes: once all others have, and all ranks of its own.

A launcher kills the rest as soon as one rank has gone, so no rank goes before.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NoReturn

from dsx.core.leaving import ORDERED, Reason
from dsx.core.transport import Farewells
from dsx.training.signals import Signals

_PARTING_SECONDS = 0.2  # what was said last may still be on its way
_HEARD_SECONDS = 2.0  # in which whoever has given an order asks what has come of it
_HARD_END_SECONDS = 10.0
logger = logging.getLogger(__name__)


class Parting:
    """One rank's; `store` is a key space of its cluster's, None where it has one rank."""

    def __init__(
        self, farewells: Callable[[], Farewells | None], store: Any, rank: int, num_ranks: int
    ) -> None:
        self._farewells, self._store = farewells, store
        self._rank, self._num_ranks = rank, num_ranks
        self._goes_alone = False
        self._has_saved: Future[None] = Future()
        self._all_have: Future[None] = Future()

    @property
    def has_saved(self) -> bool:
        """Whether this rank has nothing to do any more but to go."""
        return self._has_saved.done()

    def meet_in_cluster(self) -> None:
        """Wait until all ranks of the cluster have saved; asks the store, on a thread for that."""
        self._has_saved.result()
        try:
            if self._store is not None:
                self._store.add("saved", 1)
                while self._store.add("saved", 0) < self._num_ranks:
                    time.sleep(0.02)
        except RuntimeError:
            logger.debug("the cluster's first rank has left")
        self._all_have.set_result(None)

    def wait_for_others(self, reason: Reason, until: float, alone: bool = False) -> None:
        """Stay until all clusters, and all ranks of this one, have saved, or are given up.

        `alone`: the other clusters are not waited for; they hear of an order, and follow it.
        """
        farewells, self._goes_alone = self._farewells(), alone
        if alone and farewells is not None and reason.is_order:
            farewells.say_reason(reason)
        if farewells is not None and not (reason.is_loss or reason.leaves or alone):
            if reason.is_order:  # said before, it would stop those who are not there yet
                farewells.say_reason(reason)
            farewells.say_saved()
            while not farewells.have_saved() and time.monotonic() < until:
                time.sleep(0.02)
        self._has_saved.set_result(None)
        wait([self._all_have], max(until - time.monotonic(), 0.0))
        time.sleep(_PARTING_SECONDS * (2 if self._rank == 0 else 1))

    def let_be_heard(self, reason: Reason) -> None:
        """Stay a while, connections to the others being closed, for whoever has given an order."""
        if reason.is_order or (reason.signal == ORDERED and self._goes_alone):
            time.sleep(_HEARD_SECONDS + _PARTING_SECONDS * (self._rank == 0))


def how_it_ends(step: int, reason: Reason, path: Path | None, seconds: float, since: float) -> str:
    """Return how a cluster ends: saved to `path`, if at all, in so many `seconds`."""
    how = f"step {step}: {reason.sentence}; "
    if path is None:
        return how + "nothing is saved"
    return how + (
        f"saved in {seconds:.1f} s, {since:.1f} s after that: {path}; to go on, start the same "
        f"command again and load {path.parents[1]}"
    )


def end_if_told_again(signals: Signals, late_at: float) -> None:
    """End at once if a signal comes again, after `late_at`, by time.monotonic()."""
    count, number = signals.count()
    if count > 1 and time.monotonic() > late_at:
        logger.error("told to end again, and no step has ended meanwhile: ending now")
        end_now(128 + number)


def end_by(code: int, until: float) -> None:
    """End this process a while after `until`, by time.monotonic(), should its own end not."""

    def end() -> None:
        time.sleep(max(until - time.monotonic(), 0.0) + _HARD_END_SECONDS)
        end_now(code)

    threading.Thread(target=end, name="dsx-end", daemon=True).start()


def end_now(code: int) -> NoReturn:
    """End this process, and nothing else."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
