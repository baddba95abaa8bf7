"""A run that is told to end, by a signal to any rank of any cluster: each cluster saves, and ends.

A thread of its own hears of it: from a signal, from another rank of the cluster, or from another
cluster, which says so before it leaves. The ranks agree on one boundary (comm/stop_place.py); the
clusters do not, as each stops at its own next one. There the step is completed, the engine saves
what it trains and the outer state, with what is under way, and the process ends once all clusters
have saved: a launcher kills the rest as soon as one rank has gone.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import Signals as Signal
from typing import Any, NoReturn

from dsx.comm.launcher_watch import allow_seconds
from dsx.comm.stop_place import StopPlace
from dsx.comm.world import World
from dsx.config.sections import ClustersConfig
from dsx.core.leaving import ORDERED, Reason
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Transfer
from dsx.training.asked_saves import AskedSaves
from dsx.training.changing import Changing
from dsx.training.end_meeting import EndMeeting
from dsx.training.engine_end import Callback, Engine, save_at_end
from dsx.training.gathering import Gathering
from dsx.training.grace import Grace
from dsx.training.leaving import Leaving
from dsx.training.notices import Notices
from dsx.training.open_boundary import OpenBoundary
from dsx.training.orders import Order, Orders
from dsx.training.parting import Parting, end_by, end_if_told_again, end_now, how_it_ends
from dsx.training.records import Records
from dsx.training.signals import Signals
from dsx.training.stops import Stops
from dsx.training.waiting import Waiting

_TICK_SECONDS = 0.25
logger = logging.getLogger(__name__)


class Preemption:
    """One rank's part in it; `is_due` once the boundary has been passed where the cluster stops."""

    def __init__(
        self,
        world: World,
        clusters: ClustersConfig,
        loop: OuterLoop,
        records: Records,
        notices: Notices,
    ) -> None:
        self._world, self._loop, self._records = world, loop, records
        self._grace_seconds = clusters.grace_seconds
        self._patience_seconds = clusters.deadline_seconds  # where nobody waits for the end
        self._listens = bool(clusters.preemption_signals)
        self._stops = Stops(world, loop, clusters.grace_seconds)
        self._base: Path | None = None  # where this run has saved to, or loaded from
        self.callback: Callback | None = None
        self.engine: Engine | None = None
        self.is_due = self.is_saving = self.is_over = False
        self.grace = Grace(clusters.grace_seconds, world.rank == 0)
        self._told_at = 0.0  # by time.monotonic()
        self._open = OpenBoundary(world, loop)
        self._notices = notices
        self._is_closed = self._is_wanted = False
        self.is_finished = False  # nothing more to save, unless another step is taken
        self.orders = Orders(
            notices, world.desk, world.rank == 0, loop.method.schedule.interval, records.order
        )
        self.orders.offer("stop")
        self.asked_saves = AskedSaves(self.orders, self, world.rank == 0)
        self.changing = Changing(world, loop, self.orders)
        self._stop: Order | None = None
        self._final: Reason | None = None  # if it is another one than that of the stop
        self._parting = Parting(
            lambda: loop.transport.farewells, self._stops.store, world.rank, world.world_size
        )
        self._leaving = Leaving.of(world, clusters, lambda reason: self.place.ask(reason))
        self.waiting = Waiting(
            world, loop, clusters.quorum_wait_seconds, self.orders, records, self._stops,
            self._own_reason, lambda: self.engine is not None and not self.engine.ends_elsewhere,
        )  # fmt: skip
        self._signals = Signals(clusters.preemption_signals)
        if self._listens:
            allow_seconds(clusters.grace_seconds)
        self._thread = self._start(self._attend, "dsx-preemption")
        self._start(self._agree, "dsx-preemption-store")

    def ask(self) -> None:
        """Save and end as on a signal, from anywhere on any rank."""
        self._is_wanted = True  # no lock: this may be inside a handler of the script's
        self._signals.wake()

    def begin_boundary(self) -> None:
        """Enter the boundary that follows a step; before anything is launched."""
        self.is_finished = self.waiting.is_past = False
        self.place.begin(self._loop.history.step + 1)

    def pass_boundary(self) -> None:
        """Leave a boundary: to the next step, or the end; all stages of a pipeline do, or none."""
        is_put_off = self._loop.deferral.is_deferred
        if self._loop.adapter.stage.count > 1:
            is_put_off = self._world.in_cluster().any("what is put off at a boundary", is_put_off)
        self._take_orders()
        self.is_due = not self.place.may_leave(is_put_off or self._stop is not None)
        self._hand_over_if_due()
        self.grace.pass_boundary()
        if self.grace.num_steps == 1 and self._listens and self._world.rank == 0:
            self.asked_saves.warn_of_what_is_missing()

    def meet_at_end(self, gathering: Gathering, value: Any) -> list[Any]:
        """Return what `gather` does, once all have come to the end, unless this one stops."""
        if self.engine is None or self.engine.ends_elsewhere:
            return gathering.gather("end of training", value)
        self.begin_step()
        self._loop.settle()
        self.begin_boundary()
        meeting = EndMeeting(self._world, self._loop, self._stops, self.waiting, self._stop_here)
        return meeting.meet(gathering, value)

    def end_if_due(self) -> None:
        """Save and end the process, by SystemExit, where the cluster is to stop; engines ask.

        Where the step that a boundary belongs to is complete. On every rank of the cluster.
        """
        while self.is_due or self.is_over:
            self._end()  # and comes back where it has waited for others, and goes on
        self.asked_saves.save_due()

    def follow(self, directory: Path) -> None:
        """Save where the run has saved or loaded a tag, if it is told to end."""
        if directory.parent.name == f"cluster_{self._world.cluster_id}":
            self._base = directory.parents[1]

    def loaded(self, directory: Path) -> None:
        """Go on from a checkpoint. Collective in the cluster."""
        self.follow(directory)
        self.changing.loaded()
        self._open.look()

    def begin_step(self) -> None:
        """Apply what a loaded checkpoint had left of its boundary; engines call it before a step.

        On every rank of the cluster; it waits for the other clusters then.
        """
        self._open.end()

    def script_state(self, directory: Path) -> dict[str, Any]:
        """Return what the script's callback gives for its own state; it may write files, too."""
        if self.callback is None:
            return {}
        directory.mkdir(parents=True, exist_ok=True)
        return dict(self.callback(directory) or {})

    def close(self) -> None:
        """Hear nothing any more."""
        self._is_closed = True
        self._stops.close()
        if self._leaving is not None:
            self._leaving.close()
        self._signals.close()
        self._signals.wake()
        self._thread.join(1.0)

    @property
    def place(self) -> StopPlace:
        """Where this cluster stops next, if it is to."""
        return self._stops.place

    @property
    def state(self) -> str:
        """What this cluster does, in a word."""
        if self.is_over:
            return "saving" if self.is_saving and not self._parting.has_saved else "ending"
        if self.waiting.is_on:
            return "waiting"
        if self.asked_saves.is_saving or self.is_saving:
            return "saving"
        return "training" if self.place.reason is None else "about to end"

    @property
    def step(self) -> int:
        """Inner steps taken."""
        return self._loop.history.step

    @property
    def folder(self) -> Path | None:
        """Where the run saves to by itself, if that is known."""
        run = self._records.folder
        return self._base or (None if run is None else run / "checkpoints")

    def _start(self, target: Callable[[], None], name: str) -> threading.Thread:
        (thread := threading.Thread(target=target, name=name, daemon=True)).start()
        return thread

    def _attend(self) -> None:
        """Hear of an end, and tell the other clusters; asks no store and no disk."""
        ticks = 0
        while not self._is_closed:
            self._signals.wait(_TICK_SECONDS)
            ticks += 1
            try:
                if self.place.reason is None:
                    self._listen()
                elif self._told_at and not (self.is_due or self.is_saving):
                    end_if_told_again(self._signals, self._told_at + self._grace_seconds)
            except Exception:
                logger.exception("dsx still hears signals, but")
                time.sleep(_TICK_SECONDS)
            if ticks == 40 and self.folder is not None:
                estimate = partial(self.grace.estimate_of, self._loop, self.folder)
                self._start(estimate, "dsx-estimate-of-a-save")

    def _listen(self) -> None:
        """Look whether the run is to end; then ask for it, and say so to the other clusters."""
        farewells = self._loop.transport.farewells
        count, number = self._signals.count()
        if count and self.is_finished:
            logger.warning("told to end by %s after finish(): ending now", Signal(number).name)
            end_now(128 + number)
        heard = None if farewells is None else farewells.heard_reason()
        if self._leaving is not None and (end := self._leaving.all_end):
            self.place.ask(end)
        elif heard is not None and not heard.is_order:  # an order comes to all at one step
            self.place.ask(heard)
        elif (lost := self.waiting.reason) is not None:
            self.place.ask(lost)
        elif (own := self._own_reason()) is not None:
            ask = self.place.ask if self._leaving is None else self._leaving.ask
            ask(own)

    def _own_reason(self) -> Reason | None:
        """Why this rank is told to end, if it is."""
        count, number = self._signals.count()
        return Reason(self._world.cluster_id, number) if count or self._is_wanted else None

    def _agree(self) -> None:
        """Hear of an end from the cluster's other ranks, and agree where; asks the store."""
        if not self._stops.wait_for_one():
            return
        self._told_at = time.monotonic()
        reason, farewells = self._reason, self._loop.transport.farewells
        if reason.leaves and self._leaving is not None:
            self._told_at -= self._leaving.wait_seconds(reason)
        if farewells is not None and not (reason.is_loss or reason.is_order or reason.leaves):
            farewells.say_reason(reason)
        try:
            self.place.agree()
        except RuntimeError as error:
            logger.error("%s", error)
            if self._signals.count()[0]:
                end_now(128 + reason.signal)  # as if nobody had handled it
            return
        if self._world.rank == 0:
            logger.warning("%s: saving at the end of this step", reason.sentence)
        if not reason.is_loss:
            self._parting.meet_in_cluster()

    def _stop_here(self) -> None:
        """Stop where a rank of this cluster has been told to; back if it has waited for others."""
        self.is_due = not self.place.may_leave(has_put_off=True)
        self._hand_over_if_due()
        self.end_if_due()

    def _hand_over_if_due(self) -> None:
        if self._leaving is not None and self.is_due and self._reason.leaves:
            under_way = [t.pending for t in self._loop.in_flight if isinstance(t, Transfer)]
            self._leaving.begin(under_way, self._told_at + self._grace_seconds - 1.0)

    def _take_orders(self) -> None:
        """Take what members' tools have asked for, and all clusters have from this step on."""
        for order in self.orders.due():
            if order.do == "save":
                self.asked_saves.add(order)
            elif order.do == "set":
                self.changing.take(order)
            elif order.do == "stop" and self._stop is None:
                self._stop = order
                self.place.ask(Reason(order.cluster, ORDERED))

    def _end(self) -> None:
        if self.is_over:
            raise SystemExit(self._reason.exit_code)
        self.is_over = not self._reason.is_loss or not self.waiting.seconds
        folder, engine = self.folder, self.engine
        path, started = None, time.monotonic()
        if engine is not None and folder and (self.callback or not engine.needs_callback):
            self.is_saving = True
            path = save_at_end(engine, folder, self._loop.history.step)
        seconds = time.monotonic() - started
        if not self.is_over:
            self.is_saving = False
            self._final = self.waiting.wait(path, seconds)
            if self._final is None:
                self._go_on()
                return
            self._told_at = time.monotonic()
        self.end_saved(path, seconds)

    def _go_on(self) -> None:
        """Go on where this cluster has waited, from the boundary at which it stands."""
        self._stops.begin_next(self.step)
        self._start(self._agree, "dsx-preemption-store")
        self._open.look()
        self._open.end(may_stop=True)
        self._notices.pass_boundary(self.step)
        self._take_orders()
        self.is_due = not self.place.may_leave(self._open.look())
        self._hand_over_if_due()

    def end_saved(self, path: Path | None, seconds: float) -> NoReturn:
        """End the process, its cluster having saved to `path` within so many seconds, if at all."""
        self.is_over, has_waited = True, self._final is not None
        if has_waited or self._reason.is_loss:  # until now it might have gone on
            self._start(self._parting.meet_in_cluster, "dsx-parting")
        since = time.monotonic() - self._told_at
        how = how_it_ends(self._loop.history.step, self._reason, path, seconds, since)
        if self._world.rank == 0:
            logger.warning("%s", how)
        patience = self._patience_seconds if self._reason.is_order else self._grace_seconds
        until = max(self._told_at + patience, time.monotonic() + 1.0) - 1.0
        end_by(self._reason.exit_code, until)
        if self._stop is not None:
            self.orders.note(self._stop, "done", path=str(path or ""), seconds=seconds)
        if self._leaving is not None and self._reason.leaves and self._final is None:
            self._final, told = self._leaving.end(self._reason, path, until)
            how += f"; {told}"
        self._parting.wait_for_others(self._reason, until, has_waited)
        self._loop.transport.close()  # a thread inside gloo would abort the interpreter's end
        if self._leaving is not None:
            self._leaving.close()
        self._parting.let_be_heard(self._reason)
        self._records.end(self._loop.history.step, how, self._reason.leaves or self._reason.is_loss)
        self._records.close()
        gc.freeze()  # or the interpreter's end looks through all there is for cycles, for seconds
        raise SystemExit(self._reason.exit_code)

    @property
    def _reason(self) -> Reason:
        reason = self._final or self.place.reason
        assert reason is not None
        return reason
