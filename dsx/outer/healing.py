"""How a cluster joins a run that goes on: a copy, the rounds since, and then its part in it.

    copy of what all share as of a boundary -> take others' results, step by step, without training
    -> when near: a view takes it in -> up to where the others are -> train

The others' training threads make that copy, and wait for nothing. The steps without training are
the loop's own, with results of others in place of averages, so outer parameters are the same bits.
All ranks of the cluster do the same, those of all stages of a pipeline: what they decide they agree
on. Each takes from the ranks of its own number.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dsx.comm.launched import Launched
from dsx.core.transport import PeerLost
from dsx.core.units import format_bytes
from dsx.outer.donor import DATA
from dsx.outer.following import Following
from dsx.outer.loop import OuterLoop
from dsx.outer.parcel import Opened
from dsx.outer.shared_state import load_shared
from dsx.outer.sources import Ask, BeginAnew, Rate, Sources
from dsx.outer.transfer import NothingYet, Transfer

_TRIES = 6
_NEAR_STEPS = 2  # behind the others, for a view to take this cluster in, or as far as they come
# in half of _LEAD_SECONDS
_NO_NEARER_SECONDS = 60.0
_LOOK_SECONDS = 0.02
_TELL_SECONDS = 5.0
_LEAD_SECONDS = 0.5  # of the boundary that is copied, ahead of the others
_T = TypeVar("_T")
logger = logging.getLogger(__name__)


class Healing:
    """One rank's part; `heal` returns when the next inner step is its own."""

    def __init__(
        self,
        loop: OuterLoop,
        ask: Ask,
        clusters: Callable[[], Sequence[int]],
        first_own: Callable[[], int | None],
        ready: Callable[[], object],
        rate_mbit: float | None,
        deadline_seconds: float,
        speaks: bool,
        give_sign: Callable[[], object] = lambda: None,
        may_come: Callable[[], bool] = lambda: True,
        held: Callable[[str], Tensor | None] | None = None,
    ) -> None:
        """`clusters` are those that train. `ready` asks for a view that takes this cluster in;
        `first_own` is the first launch of which it has a part, once it is known. `may_come`: the
        others know that it comes, and leave to it what it is to read. `held(name)`: a tensor of
        what all share as it was here before (`shared_state.saved_names`), if there is one.
        """
        self._loop, self._ask, self._clusters = loop, ask, clusters
        self._first_own, self._ready = first_own, ready
        self._rate, self._deadline_seconds = Rate(rate_mbit), deadline_seconds
        self._speaks, self._give_sign = speaks, give_sign
        self._may_come, self._held = may_come, held
        self._sources: Sources | None = None
        self._following: Following
        self._has_asked = False  # for a view
        self._pace = 0  # of the others, in steps of half of _LEAD_SECONDS
        self._done = 0  # bytes that have come in this try
        self._copying: Opened | None = None  # what all share, while it is on its way
        self._telling, self._told_at = threading.Lock(), time.monotonic()
        self.copied_bytes, self.held_bytes, self.seconds = 0, 0, 0.0
        self.places: dict[str, Any] = {}  # of the others' data, at the step of this one

    def heal(self) -> None:
        """Come to where the others are, with what they hold. Collective over the cluster's ranks.

        PeerLost on all of them if it does not succeed.
        """
        began = time.monotonic()
        for attempt in range(1, _TRIES + 1):
            trouble = self._try(attempt)
            if not trouble:
                self.places = self._fetch_places()
                self._loop.adapter.sync_model_weights()  # of masters that followed
                self.seconds = time.monotonic() - began
                self._held = None  # whose file may go
                self._end_when_over()
                return
            self._give_up()
            if self._has_asked:  # a view may count on it already
                raise PeerLost(f"this cluster cannot follow the others any more: {trouble}")
            if self._speaks:
                logger.warning("healing begins anew (%d of %d): %s", attempt, _TRIES, trouble)
        raise PeerLost(f"this cluster could not join the others in {_TRIES} tries")

    def _fetch_places(self) -> dict[str, Any]:
        """Return where the data of one of the others were at this step: the same for all ranks.

        PeerLost if nobody says.
        """
        assert self._sources is not None
        step, until = self._loop.history.step, time.monotonic() + self._deadline_seconds
        while not self._any(time.monotonic() > until):
            for cluster in self._sources.clusters:
                answer = self._sources.tell_one(cluster, "places", step)
                if not self._any(answer[:1] != DATA):
                    return json.loads(answer[1:])
            time.sleep(_LOOK_SECONDS)
        raise PeerLost(f"no cluster says where its data are at step {step}")

    def _try(self, attempt: int) -> str:
        """Heal; return why it has to begin anew, the same on all ranks, empty if it has not."""
        try:
            self._copy(attempt)
            self._come_near(int(self._agree(max(self._pace, _NEAR_STEPS))) * attempt**2)
            if not self._follow_until(self._may_come):
                return "the others go on reading what is this cluster's"
            self._has_asked = True
            self._ready()
            if not self._follow_until(lambda: self._first_own() is not None):
                return "no view has taken this cluster in"
            self._catch_up()
        except BeginAnew as error:
            return str(error)
        return ""

    def _follow_until(self, is_so: Callable[[], bool]) -> bool:
        """Catch up until all ranks of the cluster find it so; False if that does not come."""
        until, step = time.monotonic() + self._deadline_seconds, self._loop.history.step
        while self._any(not is_so()):
            if self._loop.history.step > step:  # the others go on, and a launch of them is awaited
                until, step = time.monotonic() + self._deadline_seconds, self._loop.history.step
            if self._any(time.monotonic() > until):
                return False
            self._catch_up()
            time.sleep(_LOOK_SECONDS)
        return True

    def _come_near(self, steps: int) -> None:
        """Catch up to so many steps behind the others; BeginAnew if that comes no nearer."""
        least, since = float("inf"), time.monotonic()
        while True:
            self._catch_up()
            behind = self._agree(self._together(self._where) - self._loop.history.step)
            if behind <= steps:
                return
            if behind < least:
                least, since = behind, time.monotonic()
            if self._any(time.monotonic() > since + _NO_NEARER_SECONDS):
                raise BeginAnew(f"the others are {behind:g} steps ahead, and it comes no nearer")

    def _together(self, do: Callable[[], _T]) -> _T:
        """Do what may fail on one rank; BeginAnew on all of them if it has. Collective."""
        done, trouble = None, ""
        try:
            done = do()
        except BeginAnew as error:
            trouble = str(error)
        if self._any(bool(trouble)):
            raise BeginAnew(trouble or "another rank of this cluster has to")
        return cast(_T, done)

    def _copy(self, attempt: int) -> None:
        """Load what more than half of the others hold alike as of a boundary."""
        loop = self._loop
        self._done = self.copied_bytes = self.held_bytes = 0
        self._sources = sources = Sources(
            self._ask, self._clusters(), uuid.uuid4().hex, self._rate, self._deadline_seconds,
            self._moved,
        )  # fmt: skip
        step = int(self._agree(self._together(lambda: self._place_to_copy(2 ** (attempt - 1)))))

        def fetch() -> Opened:
            sources.tell("begin", step, loop.notices.places.process)
            held = self._held if attempt == 1 else None  # reading may have taken too long
            return sources.parcel(("head",), ("slice",), held, self._begin_to_copy)

        try:
            opened = self._together(fetch)
        finally:
            self._copying = None
        self.held_bytes = opened.held_bytes
        self.copied_bytes = opened.num_bytes - self.held_bytes
        self._following = Following(sources, self._first_own)
        loop.attempts.follow = self._following.take
        load_shared(loop, opened.values, opened.tensors)
        loop.settle()

    def _begin_to_copy(self, opened: Opened) -> None:
        self._copying = opened

    def _place_to_copy(self, patience: int) -> int:
        """Return a step whose boundary none of the others should have passed yet."""
        assert self._sources is not None
        first = self._sources.where()
        for cluster, place in first.items():
            if place["refuses"]:
                raise PeerLost(f"cluster {cluster} takes nobody in: {place['refuses']}")
        time.sleep(_LEAD_SECONDS / 2)
        second = self._sources.where()
        both = first.keys() & second.keys()
        self._pace = max((second[c]["step"] - first[c]["step"] for c in both), default=0)
        return max(place["step"] for place in second.values()) + (2 + 2 * self._pace) * patience

    def _catch_up(self) -> None:
        """Take the steps that the others have taken, without training; with their results."""
        loop, target = self._loop, int(self._agree(self._together(self._where)))
        while loop.history.step < target:
            loop.launch_due(is_skipped=True)
            self._await(loop.overlap.ripe(loop.in_flight, loop.history.step))
            loop.apply_ripe(may_stop=False)
            loop.totals.skipped_steps -= 1
            self._tell()

    def _await(self, ripe: Sequence[Transfer | NothingYet]) -> None:
        """Wait until all ranks have what is due; BeginAnew, or PeerLost, on all if one cannot."""
        under_way = [t.pending for t in ripe if isinstance(t, Transfer)]
        launched = [pending for pending in under_way if isinstance(pending, Launched)]
        while True:
            ended = [each.future for each in launched if each.future.done()]
            failed = next((e for future in ended if (e := future.exception())), None)
            trouble = self._following.trouble  # known by then, if that is why one has failed
            is_there = all(pending.has_arrived for pending in under_way)
            worst = self._agree(3 if trouble else 2 if failed else 0 if is_there else 1)
            if worst == 3:
                raise BeginAnew(str(trouble) if trouble else "another rank has to")
            if worst == 2:
                raise failed or PeerLost("another rank of this cluster has lost what it follows")
            if not worst:
                return
            if waited := [each.future for each in launched if not each.future.done()]:
                futures.wait(waited, _LOOK_SECONDS)
            else:
                time.sleep(_LOOK_SECONDS)
            self._tell()

    def _where(self) -> int:
        assert self._sources is not None
        return max(place["step"] for place in self._sources.where().values())

    def _agree(self, value: float) -> float:
        """Return the largest of all ranks' values. Collective in the cluster."""
        own = torch.tensor([float(value)], dtype=torch.float64)
        return float(self._loop.adapter.ranks.max_over_stages(own))

    def _any(self, flag: bool) -> bool:
        return bool(self._agree(flag))

    def _moved(self, num_bytes: int) -> None:
        self._give_sign()
        with self._telling:
            self._done += num_bytes
        if self._copying is not None:
            self._tell()

    @property
    def results_bytes(self) -> int:
        """What has come since the copy: results of the others."""
        return max(self._done - self.copied_bytes, 0)

    def _how_far(self) -> str:
        """Say what of the copy is here, or what has come since."""
        copying = self._copying
        if copying is None:
            copied, since = self.copied_bytes + self.held_bytes, self.results_bytes
            return f"{format_bytes(copied)} copied, {format_bytes(since)} of results since"
        here, whole = self._done + copying.held_bytes, copying.num_bytes
        percent = 100 * here // max(whole, 1)
        return f"{format_bytes(here)} of {format_bytes(whole)} copied ({percent} %)"

    def _tell(self) -> None:
        """Say how far this is, here and to the others; from any thread."""
        now = time.monotonic()
        with self._telling:
            if not self._speaks or now < self._told_at + _TELL_SECONDS:
                return
            self._told_at = now
        assert self._sources is not None
        text = f"{self._how_far()}, step {self._loop.history.step}"
        logger.warning("healing: %s", text)
        self._sources.say("told", text)

    def _give_up(self) -> None:
        """End this try; nothing of it is written to afterwards."""
        if self._sources is None:
            return
        self._sources.is_over = True
        self._sources.say("end")
        for transfer in self._loop.in_flight:
            if isinstance(transfer, Transfer):
                with suppress(Exception):
                    transfer.pending.wait()

    def _end_when_over(self) -> None:
        """Let the others forget this cluster once it is in a mean, behind all that it follows."""
        sources, loop, first = self._sources, self._loop, self._first_own()
        assert sources is not None and first is not None

        def is_over() -> bool:
            followed = [
                t for t in [*loop.in_flight]
                if isinstance(t, Transfer) and t.attempt.what.number <= first
            ]  # fmt: skip
            is_past = sum(loop.history.launches) >= first  # and has its first part in a mean
            return is_past and all(t.pending.has_arrived for t in followed)

        def run() -> None:
            while not is_over() and not sources.is_over:
                sources.say("told", "")
                time.sleep(1.0)
            sources.say("end")
            self._following.forget()

        threading.Thread(target=run, name="dsx-healed", daemon=True).start()
