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
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals as Signal
from typing import Any, NoReturn, Protocol

from dsx.comm.launcher_watch import allow_seconds
from dsx.comm.stop_place import StopPlace
from dsx.comm.world import World
from dsx.config.sections import ClustersConfig
from dsx.core.leaving import ORDERED, Reason
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Transfer
from dsx.training.asked_saves import AskedSaves
from dsx.training.changing import Changing
from dsx.training.grace import Grace
from dsx.training.leaving import Leaving
from dsx.training.notices import Notices
from dsx.training.orders import Order, Orders
from dsx.training.parting import Parting, end_by, end_now, how_it_ends
from dsx.training.records import Records
from dsx.training.signals import Signals

Callback = Callable[[Path], Mapping[str, Any] | None]
_TICK_SECONDS = 0.25
logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What an engine does about the end of a run."""

    needs_callback: bool  # whether the script saves what is trained
    ends_elsewhere: bool  # whether a loop of the engine's own saves and leaves
    saves_when_asked: bool  # whether it can save and go on

    def save(self, base: Path, tag: str) -> Path:
        """Save everything as a tag below `base`; return what a script loads. On every rank."""
        ...


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
        self._store = world.connect_own_store("stop_place") if world.world_size > 1 else None
        self.place = StopPlace(self._store, world.rank, world.world_size, clusters.grace_seconds)
        loop.stop_place = self.place
        self._base: Path | None = None  # where this run has saved to, or loaded from
        self.callback: Callback | None = None
        self.engine: Engine | None = None
        self.is_due = self.is_saving = self.is_over = False
        self.grace = Grace(clusters.grace_seconds, world.rank == 0)
        self._told_at = 0.0  # by time.monotonic()
        self._boundaries = 0
        self._has_open_boundary = False  # on any rank of this cluster
        self._is_closed = False
        self.is_finished = False  # nothing more to save, unless another step is taken
        self._is_wanted = False
        self.orders = Orders(
            notices, world.desk, world.rank == 0, loop.method.schedule.interval, records.order
        )
        self.orders.offer("stop")
        self.asked_saves = AskedSaves(self.orders, self, world.rank == 0)
        self.changing = Changing(world, loop, self.orders)
        self._stop: Order | None = None
        self._final: Reason | None = None  # if it is another one than that of the stop
        self._parting = Parting(
            lambda: loop.transport.farewells, self._store, world.rank, world.world_size
        )
        self._leaving = Leaving.of(world, clusters, self.place.ask)
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
        self.is_finished = False
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
        self._boundaries += 1
        if self._boundaries == 1 and self._listens and self._world.rank == 0:
            self.asked_saves.warn_of_what_is_missing()

    def begin_finish(self) -> None:
        """Wait for what is under way before `finish()` applies it; where peers leave, save and end.

        On every rank of the cluster.
        """
        if self.engine is None or self.engine.ends_elsewhere:
            return
        self.begin_step()
        self._loop.settle()
        self.begin_boundary()
        under_way = [t.pending for t in self._loop.in_flight if isinstance(t, Transfer)]
        is_there = all([self.place.may_receive(pending) for pending in under_way])
        if self._world.in_cluster().any("what is under way at the end", not is_there):
            self.is_due = not self.place.may_leave(has_put_off=True)
            self._hand_over_if_due()
            self.end_if_due()

    def end_if_due(self) -> None:
        """Save and end the process, by SystemExit, where the cluster is to stop; engines ask.

        Where the step that a boundary belongs to is complete. On every rank of the cluster.
        """
        if self.is_due or self.is_over:
            self._end()
        self.asked_saves.save_due()

    def follow(self, directory: Path) -> None:
        """Save where the run has saved or loaded a tag, if it is told to end."""
        if directory.parent.name == f"cluster_{self._world.cluster_id}":
            self._base = directory.parents[1]

    def loaded(self, directory: Path) -> None:
        """Go on from a checkpoint. Collective in the cluster."""
        self.follow(directory)
        self.changing.loaded()
        is_open = self._loop.deferral.is_deferred
        self._has_open_boundary = self._world.in_cluster().any("what was put off", is_open)

    def begin_step(self) -> None:
        """Apply what a loaded checkpoint had left of its boundary; engines call it before a step.

        On every rank of the cluster; it waits for the other clusters then.
        """
        if self._has_open_boundary:
            self._has_open_boundary = False
            self._loop.end_boundary()
            self._loop.adapter.sync_model_weights()

    def script_state(self, directory: Path) -> dict[str, Any]:
        """Return what the script's callback gives for its own state; it may write files, too."""
        if self.callback is None:
            return {}
        directory.mkdir(parents=True, exist_ok=True)
        return dict(self.callback(directory) or {})

    def close(self) -> None:
        """Hear nothing any more."""
        self._is_closed = True
        if self._leaving is not None:
            self._leaving.close()
        self._signals.close()
        self._signals.wake()
        self._thread.join(1.0)

    @property
    def state(self) -> str:
        """What this cluster does, in a word."""
        if self.is_over:
            return "saving" if self.is_saving and not self._parting.has_saved else "ending"
        if self.asked_saves.is_saving:
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
                else:
                    self._end_if_told_again()
            except Exception:
                logger.exception("dsx still hears signals, but")
                time.sleep(_TICK_SECONDS)
            if ticks == 40 and self.folder is not None:
                self._start(self._estimate, "dsx-estimate-of-a-save")

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
        elif count or self._is_wanted:
            ask = self.place.ask if self._leaving is None else self._leaving.ask
            ask(Reason(self._world.cluster_id, number))

    def _agree(self) -> None:
        """Hear of an end from the cluster's other ranks, and agree where; asks the store."""
        try:
            while not self.place.is_asked_within(2 * _TICK_SECONDS):
                if self._is_closed:
                    return
                self.place.look()
        except RuntimeError as error:
            if self._is_closed:
                return
            logger.debug("the cluster's store does not answer: %s", error)
            while not self.place.is_asked_within(2 * _TICK_SECONDS):
                pass  # what comes now cannot be agreed on, which is said then
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
        self._parting.meet_in_cluster()

    def _estimate(self) -> None:
        if (folder := self.folder) is not None:
            self.grace.estimate_of(self._loop, folder)

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

    def _end_if_told_again(self) -> None:
        """End at once if a signal comes again, long after the first, and nothing is being saved."""
        count, number = self._signals.count()
        is_late = time.monotonic() - self._told_at > self._grace_seconds
        if count > 1 and self._told_at and is_late and not (self.is_due or self.is_saving):
            logger.error("told to end again, and no step has ended meanwhile: ending now")
            end_now(128 + number)

    def _end(self) -> NoReturn:
        folder, engine = self.folder, self.engine
        if self.is_over:
            raise SystemExit(self._reason.exit_code)
        self.is_over = True
        path, started = None, time.monotonic()
        if engine is not None and folder and (self.callback or not engine.needs_callback):
            self.is_saving = True
            path = engine.save(folder, f"preempted_step{self._loop.history.step}")
        self.end_saved(path, time.monotonic() - started)

    def end_saved(self, path: Path | None, seconds: float) -> NoReturn:
        """End the process, its cluster having saved to `path` within so many seconds, if at all."""
        self.is_over = True
        since = time.monotonic() - self._told_at
        how = how_it_ends(self._loop.history.step, self._reason, path, seconds, since)
        if self._world.rank == 0:
            logger.warning("%s", how)
        patience = self._patience_seconds if self._reason.is_order else self._grace_seconds
        until = max(self._told_at + patience, time.monotonic() + 1.0) - 1.0
        end_by(self._reason.exit_code, until)
        if self._stop is not None:
            self.orders.note(self._stop, "done", path=str(path or ""), seconds=seconds)
        if self._leaving is not None and self._reason.leaves:
            self._final, told = self._leaving.end(self._reason, path, until)
            how += f"; {told}"
        self._parting.wait_for_others(self._reason, until)
        self._loop.transport.close()  # a thread inside gloo would abort the interpreter's end
        if self._leaving is not None:
            self._leaving.close()
        self._parting.let_be_heard(self._reason)
        self._records.end(self._loop.history.step, how)
        self._records.close()
        gc.freeze()  # or the interpreter's end looks through all there is for cycles, for seconds
        raise SystemExit(self._reason.exit_code)

    @property
    def _reason(self) -> Reason:
        reason = self._final or self.place.reason
        assert reason is not None
        return reason
