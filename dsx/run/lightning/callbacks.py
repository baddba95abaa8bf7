"""What Lightning's callbacks do about other clusters: records, one stop for all, the end.

Two callbacks: the first of the Trainer's, so that all others see what was agreed on and the
finished model, and the last, behind a ModelCheckpoint that saves at the same step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsx.config.files import ConfigError
from dsx.engines.end_of_script import settle_before_backward
from dsx.run.lightning.fit import Fit, has_engine
from dsx.run.lightning.metrics import agree_on_validation
from dsx.run.own_loggers import figures_for_loggers
from dsx.run.same_settings import differing
from dsx.training.handle import Handle
from dsx.training.seen_training import see_loss


class EndOfTrainer:
    """Saves a checkpoint of Lightning's where the run is told to end, behind a whole step."""

    needs_callback, ends_elsewhere, saves_when_asked = False, True, False

    def __init__(self, trainer: Any, cluster_id: int) -> None:
        self._trainer = trainer
        self._folder = f"cluster_{cluster_id}"

    def save(self, base: Path, tag: str) -> Path:
        """Save as the Trainer does, below `base`; return the checkpoint."""
        path = base / self._folder / f"{tag}.ckpt"
        self._trainer.save_checkpoint(str(path))
        return path


def make_callbacks(base: Any, trainer: Any, fit: Fit) -> tuple[Any, Any]:
    """Return the callback to stand first in a Trainer and the one to stand last."""
    return _make_first(base, trainer, fit), _make_last(base, trainer, fit)


def _make_first(base: Any, trainer: Any, fit: Fit) -> Any:
    handle = fit.require_handle()

    class DsxFirst(base):
        """Stands first among the Trainer's callbacks."""

        def on_train_start(self, *_: Any) -> None:
            _require_same_length(trainer, handle)

        def on_train_batch_start(self, *_: Any) -> None:
            handle.preemption.begin_step()
            settle_before_backward(handle)

        def on_train_epoch_end(self, *_: Any) -> None:
            if trainer.num_training_batches == float("inf"):
                _require_same_end(trainer, handle)

        def on_validation_end(self, *_: Any) -> None:
            if fit.is_training and not trainer.sanity_checking:
                handle.log("validation", **agree_on_validation(trainer, fit))

        def on_train_end(self, *_: Any) -> None:
            fit.end(trainer.strategy)

    return DsxFirst()


def _make_last(base: Any, trainer: Any, fit: Fit) -> Any:
    handle = fit.require_handle()

    class DsxLast(base):
        """Stands last among the Trainer's callbacks."""

        def __init__(self) -> None:
            self.steps = (trainer.global_step, handle.step)

        def on_train_start(self, *_: Any) -> None:
            self.steps = (trainer.global_step, handle.step)
            total = trainer.estimated_stepping_batches
            if total != float("inf"):
                handle.progress.note({"total_steps": int(total)})

        def on_train_batch_end(self, _: Any, module: Any, outputs: Any, *__: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            see_loss(handle.progress, loss)
            taken, counted = self.steps
            is_plain = module.automatic_optimization and not has_engine(trainer.strategy)
            if trainer.global_step > taken and handle.step == counted and is_plain:
                handle.skip_inner_step()  # a GradScaler has not called the optimizer
            if handle.step == counted:
                return
            self.steps = (trainer.global_step, handle.step)
            every = trainer.log_every_n_steps  # 0: never
            if every and handle.step % every == 0:
                if loss is not None:
                    handle.log_step(loss=float(loss))
                for one in trainer.loggers:
                    one.log_metrics(figures_for_loggers(handle), step=trainer.global_step)
            if handle.should_stop():
                fit.is_agreed = True
                trainer.should_stop = True

    return DsxLast()


def _saves(callback: Any) -> list[str]:
    """Return what decides when a ModelCheckpoint saves."""
    names = ("state_key", "save_top_k", "save_last", "save_weights_only")
    told = [*names, "_save_on_train_epoch_end"]
    return [str(getattr(callback, name, None)) for name in told]


def _require_same_end(trainer: Any, handle: Handle) -> None:
    """Raise RuntimeError unless an epoch of streamed data has ended at one step in all clusters."""
    steps = handle.gather(trainer.global_step)
    if any(step != steps[0] for step in steps):
        shown = ", ".join(f"cluster {m}: {step}" for m, step in enumerate(steps))
        raise RuntimeError(
            f"the clusters' streams end at different steps ({shown}), and validate and save "
            "together: give limit_train_batches as a number that all of them have"
        )


def _require_same_length(trainer: Any, handle: Handle) -> None:
    """Raise ConfigError unless all clusters train, validate and save at the same steps."""
    kinds = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    told = handle.gather(
        {
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "batches per epoch": trainer.num_training_batches,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "val_check_interval": trainer.val_check_batch,
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
            "lr_schedulers": kinds,
            "validation": bool(trainer.enable_validation),
            "ModelCheckpoint": [_saves(one) for one in trainer.checkpoint_callbacks],
        }
    )
    for name, shown in differing(told):
        raise ConfigError(
            f"the Trainers of the clusters have different {name} ({shown}), and validate and "
            "save together: with data of their own give limit_train_batches as a number, and "
            "the same settings in all clusters"
        )
