"""The end of training, agreed between clusters; and a line on the way there.

Wraps `checkpoint_and_decide_exit`, which the loop calls after every step. After the last one, and
before its checkpoint, what is under way is applied: that checkpoint is of the finished model. A
stop for `--exit-duration-in-mins` is one cluster's own: it is asked for, and all clusters stop at
one later step, as if `--exit-interval` had named it, with a checkpoint that holds what is under
way. A signal does not leave the time for that: each cluster stops at its own next step. Wraps
`train`, which is left then by exiting, and before which a cluster that joins others comes to where
they are (joining.py).
"""

from __future__ import annotations

import atexit
import functools
import inspect
import time
from pathlib import Path
from typing import Any

from dsx.engines.megatron.own_part import tag_of
from megatron_patches import probe
from megatron_patches.joining import join_if_due
from megatron_patches.run import Run
from megatron_patches.tree import ITERATORS


def patch(run: Run) -> None:
    """Agree on stops, and finish after `train`."""
    training = probe.training()
    train = probe.function(training, "train", ITERATORS)
    of_train = inspect.signature(train)
    decide = probe.function(training, "checkpoint_and_decide_exit", ["iteration"])
    signals = probe.function(training, "get_signal_handler")
    probe.start_of_training(training)
    watch = _Watch(run, training)

    @functools.wraps(train)
    def train_and_finish(*args: Any, **kwargs: Any) -> Any:
        given = of_train.bind(*args, **kwargs).arguments
        join_if_due(run, *(given.get(name) for name in ITERATORS))
        watch.begin()
        try:
            result = train(*args, **kwargs)
        except SystemExit:
            watch.end_early()  # with a status of its own, where the run was told to end
            raise
        watch.finish()  # where no iteration was the last one, say none was to be taken
        return result

    @functools.wraps(decide)
    def checkpoint_and_decide_exit(
        model: Any, optimizer: Any, scheduler: Any, iteration: int, *args: Any, **kwargs: Any
    ) -> Any:
        if run.handle is None:
            return decide(model, optimizer, scheduler, iteration, *args, **kwargs)
        arguments = probe.arguments_in_force()
        watch.pass_iteration(iteration, arguments, signals)
        own = arguments.exit_signal_handler, arguments.exit_duration_in_mins
        arguments.exit_signal_handler, arguments.exit_duration_in_mins = False, None
        try:
            return decide(model, optimizer, scheduler, iteration, *args, **kwargs)
        finally:
            arguments.exit_signal_handler, arguments.exit_duration_in_mins = own

    training.train = train_and_finish
    training.checkpoint_and_decide_exit = checkpoint_and_decide_exit


class _Watch:
    """Looks after one rank's training from step to step."""

    def __init__(self, run: Run, training: Any) -> None:
        self._run = run
        self._training = training
        self._logged = time.monotonic()
        self._blocked = 0.0
        self._is_finished = False
        self._all_leave = False
        self._iteration, self._saves_from = 0, 0.0
        self._saves_to: str | None = None

    def begin(self) -> None:
        """Start the clock of what is logged; that of --exit-duration-in-mins is Megatron's own."""
        self._logged = time.monotonic()

    def pass_iteration(self, iteration: int, arguments: Any, signals: Any) -> None:
        """Ask for a stop where this cluster wants one, and make the loop exit at an agreed one."""
        handle, self._iteration = self._run.handle, iteration
        assert handle is not None
        if arguments.exit_signal_handler and any(signals().signals_received()):
            handle.preempt()
        if handle.preemption.is_due:  # this cluster alone: Megatron saves, and exits
            handle.preemption.is_saving = True
            self._saves_from, self._saves_to = time.monotonic(), arguments.save
            arguments.exit_interval = iteration
            return
        minutes = arguments.exit_duration_in_mins
        if minutes and time.time() - probe.start_of_training(self._training) > 60 * minutes:
            handle.request_stop(f"--exit-duration-in-mins {minutes}")
        if handle.should_stop():
            arguments.exit_interval = iteration
        self._all_leave = bool(arguments.exit_interval) and not iteration % arguments.exit_interval
        if iteration % arguments.log_interval == 0:
            self._log(iteration)
        if iteration >= arguments.train_iters:
            self.finish()

    def finish(self) -> None:
        """Apply what is under way, with all clusters; once."""
        handle = self._run.handle
        if handle is None or self._is_finished:
            return
        self._is_finished = True
        handle.finish()
        totals = handle.totals
        self._run.tell(
            f"finished after {handle.step} steps, {totals.syncs} syncs; this rank sent "
            f"{totals.bytes_sent / 1e6:.2f} MB and waited {totals.wait_seconds:.2f} s"
        )
        atexit.register(handle.close)

    def end_early(self) -> None:
        """Release connections; what is under way is in the checkpoint, if one was saved.

        A preempted cluster whose save was not done says that nothing is saved.
        """
        if self._run.handle is not None:
            preemption = self._run.handle.preemption
            if preemption.is_saving:
                path = None
                if self._saves_to and self._run.saved_iteration == self._iteration:
                    path = Path(self._saves_to) / tag_of(self._iteration)
                preemption.end_saved(path, time.monotonic() - self._saves_from)
            if self._all_leave:  # none takes its connections away before all have come here
                self._run.handle.gather("exit")
            self._run.handle.close()

    def _log(self, iteration: int) -> None:
        handle = self._run.handle
        assert handle is not None
        now, blocked = time.monotonic(), handle.totals.blocked_seconds
        utilization = 1 - (blocked - self._blocked) / (now - self._logged)
        self._logged, self._blocked = now, blocked
        self._run.tell(
            f"iteration {iteration}, utilization {100 * utilization:.1f} %, this rank sent "
            f"{handle.totals.bytes_sent / 1e6:.2f} MB in {handle.totals.syncs} syncs"
        )
