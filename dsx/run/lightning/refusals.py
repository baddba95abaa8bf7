"""What of Lightning is not served across clusters: refused by name as fit() begins."""

from __future__ import annotations

from typing import Any

from dsx.config.files import ConfigError
from dsx.run.lightning.fit import Fit, has_engine
from dsx.run.session import RouteNotTaken

_SERVED = (
    "DDPStrategy ('ddp'), ModelParallelStrategy (FSDP2), DeepSpeedStrategy ('deepspeed'), and one "
    "device per cluster"
)
_CALLBACKS = {
    "LearningRateFinder": "it trains and goes back before training: look for a rate without dsx",
    "BatchSizeFinder": "it finds a size for each cluster, and the clusters' have to be equal: set "
    "batch_size",
    "StochasticWeightAveraging": "it would average each cluster's own weights, beside the outer "
    "step: leave it out",
    "WeightAveraging": "it would average each cluster's own weights, beside the outer step: leave "
    "it out",
    "OnExceptionCheckpoint": "it saves in the midst of a step, in one cluster: leave it out; told "
    "to end by a signal, dsx saves by itself",
}


def refuse(trainer: Any, fit: Fit) -> None:
    """Raise ConfigError, or RouteNotTaken for a strategy, that names what is not served."""
    if fit.has_begun:
        raise ConfigError(
            "Trainer.fit() is called a second time, and after the first one the Trainer holds the "
            "finished model: set max_epochs or max_steps to train longer, or make a new Trainer"
        )
    _refuse_strategy(trainer.strategy, fit.world.world_size)
    refuse_callbacks(trainer)
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ConfigError(
            "Trainer(val_check_interval=<a time>) validates by each cluster's own clock, and the "
            "others would wait for it: give a number of steps or a share of an epoch"
        )
    for folder in (trainer.default_root_dir, *(one.save_dir for one in trainer.loggers)):
        if "://" in str(folder or ""):
            raise ConfigError(
                f"{str(folder)!r} (default_root_dir, or a logger's) is not on a file system, where "
                "checkpoints and the outer state beside them have to be: give a local or a mounted "
                "folder"
            )
    if type(trainer.strategy.checkpoint_io).__name__ == "AsyncCheckpointIO":
        raise ConfigError(
            "AsyncCheckpointIO writes a checkpoint after it has been declared complete: leave it "
            "out of Trainer(plugins=...)"
        )
    settings = fit.session.settings
    if settings.checkpoints.keep is not None:
        raise ConfigError(
            f"dsx.checkpoints.keep={settings.checkpoints.keep} would delete what ModelCheckpoint "
            "has saved: leave it out and set ModelCheckpoint(save_top_k=...)"
        )
    if settings.divergence.max_rollbacks:
        raise ConfigError(
            f"dsx.divergence.max_rollbacks={settings.divergence.max_rollbacks} is not served with "
            "Lightning, whose loops count steps and samples themselves: leave it out; a run that "
            "has diverged ends, and the next start takes a checkpoint of before"
        )


def refuse_callbacks(trainer: Any) -> None:
    """Raise ConfigError for a callback that would act in one cluster alone."""
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _CALLBACKS and "lightning" in cls.__module__:
                raise ConfigError(
                    f"the callback {cls.__name__} is not served by dsx.run: "
                    f"{_CALLBACKS[cls.__name__]}"
                )
        if getattr(callback, "_train_time_interval", None) is not None:
            raise ConfigError(
                "ModelCheckpoint(train_time_interval=...) saves by each cluster's own clock, and "
                "the others would wait for it: set every_n_train_steps"
            )
        if getattr(callback, "save_on_exception", False):
            raise ConfigError(
                "ModelCheckpoint(save_on_exception=True) saves in the midst of a step, in one "
                "cluster: leave it out; told to end by a signal, dsx saves by itself"
            )
        if "://" in str(getattr(callback, "dirpath", None) or ""):
            raise ConfigError(
                f"ModelCheckpoint(dirpath={str(callback.dirpath)!r}) is not on a file system, and "
                "the outer state beside it has to be: give a local or a mounted folder"
            )


def _refuse_strategy(strategy: Any, num_ranks: int) -> None:
    names = [cls.__name__ for cls in type(strategy).__mro__]
    name = names[0]
    if "FSDPStrategy" in names:
        raise RouteNotTaken(
            "Lightning's FSDPStrategy shards with FSDP1, which is not served: use "
            "ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1) and call "
            "torch.distributed.fsdp.fully_shard in configure_model(), or strategy='ddp'"
        )
    if "ModelParallelStrategy" in names:
        if strategy._tensor_parallel_size != 1:
            raise RouteNotTaken(
                f"ModelParallelStrategy(tensor_parallel_size={strategy._tensor_parallel_size!r}) "
                "is not served: set tensor_parallel_size=1, and data_parallel_size to the number "
                "of ranks"
            )
        return
    if "DDPStrategy" in names and not has_engine(strategy):
        if strategy._start_method != "popen":
            raise RouteNotTaken(
                f"Lightning's strategy starts its ranks by {strategy._start_method!r}, and a "
                "launcher has started them already: strategy='ddp'"
            )
        if strategy._model_averaging_period is not None:
            raise RouteNotTaken(
                "DDPStrategy(model_averaging_period=...) averages models beside the outer step: "
                "leave it out"
            )
        return
    if name == "SingleDeviceStrategy":
        if num_ranks > 1:
            raise RouteNotTaken(
                f"Trainer(strategy='auto') trains on one device, and this cluster has {num_ranks} "
                f"ranks, each of which would train a model of its own: strategy='ddp'"
            )
        return
    if not has_engine(strategy):
        raise RouteNotTaken(f"Lightning's {name} is not served by dsx.run, which serves {_SERVED}")
