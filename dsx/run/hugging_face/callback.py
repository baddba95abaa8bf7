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

from dsx.training.handle import Handle

_COUNTED = ("loss", "learning_rate", "grad_norm")


class EndOfTrainer:
    """Saves a checkpoint of the Trainer's where the run is told to end, behind a whole step."""

    needs_callback, ends_elsewhere = False, True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def save(self, base: Path, tag: str) -> Path:
        """Save as the Trainer does, whatever `base` and `tag`; return the folder."""
        trainer = self._trainer
        trainer._save_checkpoint(trainer.model, trial=None)
        return Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"


def make_callback(
    transformers_callback: ModuleType, trainer: Any, handle_of: Callable[[Any], Handle],
    end: Callable[[Any], None],
) -> Any:  # fmt: skip
    """Return the callback of one `train()`; `end(trainer)` is called once it is over."""
    base: Any = transformers_callback.TrainerCallback

    class DsxCallback(base):
        """Stands last among the Trainer's callbacks."""

        def __init__(self) -> None:
            self.is_agreed = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            handle = handle_of(trainer)
            handle.preemption.engine = EndOfTrainer(trainer)
            own = Path(args.output_dir)
            handle.preemption.follow(own / f"cluster_{handle.cluster_id}" / "of_trainer")

        def _hold(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_end = state.global_step >= state.max_steps
            if control.should_training_stop and not self.is_agreed and not is_end:
                handle_of(trainer).request_stop("a callback of the Trainer's asks for it")
                control.should_training_stop = False

        on_epoch_begin = on_epoch_end = on_evaluate = on_save = _hold

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

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            end(trainer)

    return DsxCallback()
