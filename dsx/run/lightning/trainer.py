"""`Trainer` and its strategies: joined, attached, evaluated and ended as the clusters' average.

In training the modules hold a cluster's own weights; validation, and each checkpoint, see the
average. At the end what is under way is applied, and the average stays: whatever the script does
next with the model, it does with the finished one.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsx.checkpoint.tags import cluster_directory
from dsx.config.files import read_json
from dsx.run.lightning.callbacks import EndOfTrainer, make_callbacks
from dsx.run.lightning.checkpoints import replace_checkpoints
from dsx.run.lightning.data import replace_loaders
from dsx.run.lightning.fit import Fit, fit_of, is_fitting, set_fit
from dsx.run.lightning.hooks import around, around_property, modules_of
from dsx.run.lightning.metrics import replace_metrics
from dsx.run.lightning.places import base_of_checkpoints, replace_places, share_log_versions
from dsx.run.lightning.refusals import refuse, refuse_callbacks
from dsx.run.lightning.resume import replace_resume
from dsx.run.session import Session

_CONFIG_VARIABLE = "PL_DEEPSPEED_CONFIG_PATH"
_PLAIN = {
    "strategies.ddp": "DDPStrategy",
    "strategies.single_device": "SingleDeviceStrategy",
    "strategies.model_parallel": "ModelParallelStrategy",
}


def replace_lightning(session: Session, root: str) -> None:
    """Replace what a Trainer does alone; `root` is `lightning.pytorch` or `pytorch_lightning`."""
    module = modules_of(root)
    replace_places(session, root)
    replace_loaders(root)
    replace_metrics(root)
    replace_checkpoints(root)
    replace_resume(root)
    trainer = module("trainer.trainer").Trainer
    around(trainer, "__init__", _make(session))
    around(trainer, "_fit_impl", _fit)
    around(trainer, "_run_stage", _run_stage)
    trainer.should_stop = property(_get_stop, _set_stop)
    around(module("loops.evaluation_loop")._EvaluationLoop, "run", _evaluate)
    around(module("callbacks.model_checkpoint").ModelCheckpoint, "setup", _set_up_checkpoints)
    signals = module("trainer.connectors.signal_connector")._SignalConnector
    around(signals, "register_signal_handlers", _register_signals)
    engine = module("strategies.deepspeed").DeepSpeedStrategy
    around(engine, "__init__", _make_engine_strategy(session))
    callback = module("callbacks.callback").Callback
    for place, name in _PLAIN.items():
        cls = getattr(module(place), name)
        around(cls, "setup", _set_up(callback))
        around_property(cls, "restore_checkpoint_after_setup", _restores_late)
    around(engine, "setup", _set_up(callback))


def _make(session: Session) -> Callable[..., None]:
    def make(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
        file = os.environ.get(_CONFIG_VARIABLE)
        if file and Path(file).is_file():
            session.show(read_json(file), f"{_CONFIG_VARIABLE}={file}", file)
        world = session.join()
        original(*args, **kwargs)
        if world is not None:
            set_fit(trainer, Fit(session, world))

    return make


def _make_engine_strategy(session: Session) -> Callable[..., None]:
    def make(original: Callable[..., Any], strategy: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        session.show(strategy.config, "DeepSpeedStrategy(config=...)")

    return make


def _fit(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Begin fit(): refuse what is not served, agree on folders. Collective over all clusters."""
    fit = fit_of(trainer)
    if fit is None:
        original(*args, **kwargs)
        return
    refuse(trainer, fit)
    fit.has_begun = True
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    fit.weights_only = given.get("weights_only")
    share_log_versions(trainer.loggers, fit.world)
    strategy = trainer.strategy
    ranks, all_ranks = fit.world.world_size, fit.world.world_size * fit.world.num_clusters
    if getattr(strategy, "_data_parallel_size", None) == all_ranks:
        strategy._data_parallel_size = ranks  # the script counts as without dsx
    original(*args, **kwargs)


def _set_up_checkpoints(
    original: Callable[..., Any], callback: Any, trainer: Any, pl_module: Any, stage: str
) -> None:
    fit = fit_of(trainer)
    if fit is not None and stage == "fit":
        base = base_of_checkpoints(callback, trainer)
        callback.dirpath = str(cluster_directory(base, fit.world.cluster_id))
    original(trainer, pl_module, stage)


def _set_up(callback: Any) -> Callable[..., None]:
    def set_up(original: Callable[..., Any], strategy: Any, trainer: Any) -> None:
        """Attach what the strategy has made for training."""
        original(trainer)
        fit = fit_of(trainer)
        if fit is None or not is_fitting(trainer) or fit.handle is not None:
            return
        refuse_callbacks(trainer)
        fit.attach(strategy)
        handle = fit.require_handle()
        handle.preemption.engine = EndOfTrainer(trainer, handle.cluster_id)
        handle.preemption.follow(_own_folder(trainer, handle.cluster_id) / "of_trainer")
        first, last = make_callbacks(callback, trainer, fit)
        trainer.callbacks.insert(0, first)
        trainer.callbacks.append(last)

    return set_up


def _own_folder(trainer: Any, cluster_id: int) -> Path:
    """Return where this cluster saves if it is told to end."""
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "save_top_k"):
            return Path(callback.dirpath)
    return cluster_directory(Path(trainer.default_root_dir).absolute(), cluster_id)


def _restores_late(original: Callable[[], Any], strategy: Any) -> bool:
    """Whether a checkpoint is loaded once the engine is attached, taking cluster 0's weights."""
    module: Any = strategy.lightning_module
    trainer: Any = getattr(module, "trainer", None)
    fit = None if trainer is None else fit_of(trainer)
    return bool(original()) or (fit is not None and is_fitting(trainer))


def _run_stage(original: Callable[..., Any], trainer: Any) -> Any:
    result = original()
    fit = fit_of(trainer)
    if fit is not None and is_fitting(trainer):
        fit.end(trainer.strategy)  # of a fit() that had no step to take
    return result


def _evaluate(original: Callable[..., Any], loop: Any) -> Any:
    """Validate the clusters' average in training. Collective over all clusters then."""
    trainer = loop.trainer
    fit = fit_of(trainer)
    is_inside = fit is not None and fit.is_training and is_fitting(trainer)
    if fit is None or not is_inside or trainer.sanity_checking:
        return original()
    fit.metrics = {}  # those of the last validation, which this one is about to replace
    with fit.require_handle().averaged():
        return original()


def _get_stop(trainer: Any) -> bool:
    return bool(vars(trainer).get("_should_stop", False))


def _set_stop(trainer: Any, value: bool) -> None:
    """Stop, or ask all clusters to stop at one step, whoever of the Trainer's wants it."""
    fit = fit_of(trainer)
    if value and fit is not None and fit.is_training and not fit.is_agreed:
        fit.require_handle().request_stop("the Trainer's should_stop was set")
        return
    vars(trainer)["_should_stop"] = value


def _register_signals(original: Callable[..., Any], connector: Any) -> None:
    """Leave SIGTERM to dsx, which ends all clusters, where Lightning would end this rank."""
    before = signal.getsignal(signal.SIGTERM)
    original()
    fit = fit_of(connector.trainer)
    if fit is not None and fit.is_training:
        connector._register_signal(signal.SIGTERM, before)
