"""What a Trainer's callbacks do about other clusters: one stop for all, records, the end of a run.

A callback that stops training (EarlyStoppingCallback, one that looks at the clock) would leave the
other clusters waiting. So this one, the last in the list, asks for the stop instead, and all take
it at one step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dsx.config.files import ConfigError
from dsx.run.own_loggers import figures_for_loggers
from dsx.run.same_settings import differing
from dsx.training.handle import Handle

_COUNTED = ("loss", "learning_rate", "grad_norm")


class EndOfTrainer:
    """Saves a checkpoint of the Trainer's where the run is told to end, behind a whole step."""

    needs_callback, ends_elsewhere, saves_when_asked = False, True, False

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def save(self, base: Path, tag: str) -> Path:
        """Save as the Trainer does, whatever `base` and `tag`; return the folder."""
        trainer = self._trainer
        trainer._save_checkpoint(trainer.model, trial=None)
        return Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"


def make_callbacks(
    transformers_callback: ModuleType, trainer: Any, handle_of: Callable[[Any], Handle],
    end: Callable[[Any], None],
) -> tuple[Any, Any]:  # fmt: skip
    """Return the callbacks of one `train()`, the one to stand first and the last one.

    `end(trainer)` is called once it is over.
    """
    base: Any = transformers_callback.TrainerCallback

    class EndOfTraining(base):
        """Stands first: the others see dsx's figures, and the finished model at the end."""

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            end(trainer)

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs.get("logs")
            if logs is not None and "loss" in logs:  # those behind are the Trainer's loggers
                logs.update(figures_for_loggers(handle_of(trainer)))

    return EndOfTraining(), _make_last(base, trainer, handle_of)


def _make_last(base: Any, trainer: Any, handle_of: Callable[[Any], Handle]) -> Any:
    class DsxCallback(base):
        """Stands last among the Trainer's callbacks."""

        def __init__(self) -> None:
            self.is_agreed = False
            self.begun_at = -1  # the step at which an epoch has begun

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            handle = handle_of(trainer)
            _require_same_length(handle, args, state)
            handle.preemption.engine = EndOfTrainer(trainer)
            own = Path(args.output_dir)
            handle.preemption.follow(own / f"cluster_{handle.cluster_id}" / "of_trainer")
            handle.progress.note({"total_steps": state.max_steps})

        def _hold(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_end = state.global_step >= state.max_steps
            if control.should_epoch_stop and not self.is_agreed and not is_end:
                _refuse_early_end(state)
            if control.should_training_stop and not self.is_agreed and not is_end:
                handle_of(trainer).request_stop("a callback of the Trainer's asks for it")
                control.should_training_stop = False

        on_evaluate = on_save = on_step_begin = on_substep_end = _hold
        on_pre_optimizer_step = on_optimizer_step = on_prediction_step = _hold

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.begun_at = state.global_step
            self._hold(args, state, control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_empty = state.global_step == self.begun_at
            if control.should_training_stop and is_empty and not self.is_agreed:
                _refuse_no_batch(state)
            self._hold(args, state, control)

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs.get("logs") or {}
            counted = {name: logs[name] for name in _COUNTED if name in logs}
            if "loss" in counted and handle_of(trainer).step:
                handle_of(trainer).log_step(**counted)
            evaluated = {n: v for n, v in logs.items() if n.startswith("eval_")}
            if evaluated:
                handle_of(trainer).log("validation", **evaluated)
            self._hold(args, state, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._hold(args, state, control)
            handle = handle_of(trainer)
            handle.preemption.end_if_due()
            if handle.should_stop():
                self.is_agreed = control.should_training_stop = True

    return DsxCallback()


def _refuse_early_end(state: Any) -> None:
    raise ConfigError(
        f"a callback of the Trainer's ends an epoch early (should_epoch_stop, at step "
        f"{state.global_step}), which is not served: all clusters take the same steps; set "
        "max_steps, or stop the training (should_training_stop)"
    )


def _refuse_no_batch(state: Any) -> None:
    raise RuntimeError(
        f"step {state.global_step} of {state.max_steps}: the training data gave this cluster no "
        "batch any more, and the others would wait for it: give each cluster as many batches, or "
        "set max_steps to what all of them have"
    )


def _require_same_length(handle: Handle, args: Any, state: Any) -> None:
    """Raise ConfigError unless all clusters train as long, by one schedule. Collective over all."""
    kind = args.lr_scheduler_type
    told = handle.gather(
        {
            "max_steps": state.max_steps,
            "lr_scheduler_type": str(getattr(kind, "value", kind)),
            "learning_rate": args.learning_rate,
            "warmup_steps": args.get_warmup_steps(state.max_steps),
        }
    )
    for name, shown in differing(told):
        raise ConfigError(
            f"the Trainers of the clusters have different {name} ({shown}): with data of its "
            "own a cluster's epochs are as long as that; set max_steps, and the same schedule, "
            "in all clusters"
        )
