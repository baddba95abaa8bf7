"""`Trainer`: its data cut, its stop agreed, evaluated and saved as the clusters' average.

In training the engine holds a cluster's own weights; evaluation, and each `save_model`, hold the
average. At the end what is under way is applied, and the average stays: whatever the script does
next with the model, it does with the finished one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from dsx.comm.world import World, current_world
from dsx.config.checkpoints import REMOTE
from dsx.config.files import ConfigError
from dsx.run.data import cut_for_cluster, is_a_stream, is_shared
from dsx.run.folders import save_beside
from dsx.run.hugging_face.callback import make_callbacks
from dsx.run.hugging_face.checkpoints import common_checkpoint
from dsx.run.hugging_face.saves import Saves, bring
from dsx.run.hugging_face.sequel import Begun, Part
from dsx.run.hugging_face.states import begin_from_trainer, weights_of
from dsx.run.hugging_face.synchronous import (
    begun_at,
    follow,
    holds_torch_states,
    is_plain,
    refuse_stream,
    require_whole_model,
)
from dsx.run.replace import original_of
from dsx.run.session import RouteNotTaken, Session
from dsx.training.finish import keep_exported
from dsx.training.handle import Handle

_RESUME = "resume_from_checkpoint"


def handle_of(trainer: Any) -> Handle | None:
    """Return the handle of what a Trainer trains; None before it has an engine."""
    return getattr(getattr(trainer, "deepspeed", None), "dsx", None)


def replace_trainer(session: Session, trainer: ModuleType, callbacks: ModuleType) -> None:
    """Replace the methods of `Trainer`, and what it calls to load and to delete checkpoints."""
    _Replaced(session, trainer, callbacks).replace()


class _Replaced:
    """The methods that stand in for Trainer's, and those themselves."""

    def __init__(self, session: Session, module: ModuleType, callbacks: ModuleType) -> None:
        self._session = session
        self._module: Any = module
        self._callbacks = callbacks
        self._cls: Any = module.Trainer  # type: ignore[attr-defined]
        self._ended: list[Any] = []
        self._saves: dict[Any, Saves] = {}
        self._begun: Begun | None = None  # where a run without dsx was
        self._weights: dict[str, Tensor] = {}  # of one without DeepSpeed, until they are taken

    def replace(self) -> None:
        """Put them in place."""
        for name in (
            "train", "create_optimizer", "evaluate", "save_model", "_save_checkpoint",
            "_load_best_model",
        ):  # fmt: skip
            self._around(name, getattr(self, name.removeprefix("_")))
        load = original_of(self._module, "deepspeed_load_checkpoint")
        self._module.deepspeed_load_checkpoint = self._load(load)

    def _around(self, name: str, act: Callable[..., Any]) -> None:
        original = original_of(self._cls, name)

        @functools.wraps(original)
        def replaced(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            return act(functools.partial(original, trainer), trainer, *args, **kwargs)

        setattr(self._cls, name, replaced)

    def train(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Train across clusters, from a checkpoint that all of them have, if from one."""
        world = self._session.join()
        if world is None:
            return original(*args, **kwargs)
        self._refuse(trainer)
        self._session.trainers.append(trainer)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        asked = given.get(_RESUME) or None
        bring(trainer.args.output_dir, asked, world, self._settings().checkpoints)
        folder = common_checkpoint(trainer.args.output_dir, asked, world)
        given[_RESUME] = None if folder is None else str(folder)
        self._take_data(trainer, folder, world)
        first, last = make_callbacks(self._callbacks, trainer, _require_handle, self._end)
        trainer.add_callback(last)
        trainer.callback_handler.callbacks.insert(0, first)
        more = given.pop("kwargs", {})
        return original(**given, **more)

    def create_optimizer(
        self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Take out what DeepSpeed takes out of an optimizer: groups that have no parameters.

        transformers 4 makes the schedule before the engine, for all groups, and torch refuses a
        schedule for more than there are. With LoRA no parameter is without weight decay.
        """
        optimizer = original(*args, **kwargs)
        groups = getattr(optimizer, "param_groups", None)
        if groups and trainer.is_deepspeed_enabled and current_world() is not None:
            groups[:] = [group for group in groups if group["params"]]
        return optimizer

    def _take_data(self, trainer: Any, folder: Path | None, world: World) -> None:
        """Cut the data, or what a run without dsx has left of it. Collective over all clusters."""
        wanted = self._settings().clusters.data
        self._session.divides_data = True
        self._begun = None
        begins = folder is not None and is_plain(folder)
        if folder is not None:
            self._begun = begun_at(trainer, folder) if begins else Begun.of(folder)
        if begins and folder is not None and holds_torch_states(folder):
            require_whole_model(trainer, folder)
            trainer._load_from_checkpoint(str(folder))
            self._weights = weights_of(trainer.model)
        data = trainer.train_dataset
        if self._begun is None or data is None:
            trainer.train_dataset = cut_for_cluster(data, world, wanted)
            return
        is_split = is_shared(data, world, wanted)
        if is_a_stream(data):
            refuse_stream(trainer)
            trainer.train_dataset = cut_for_cluster(data, world, wanted)
            return
        shared = Part(len(data), world.cluster_id, world.num_clusters)
        part = shared if is_split else Part(len(data), is_own=True)
        follow(trainer, self._cls, self._begun, part)
        if trainer.args.ignore_data_skip:
            self._begun = None
            trainer.train_dataset = cut_for_cluster(data, world, wanted)

    def _refuse(self, trainer: Any) -> None:
        if not trainer.is_deepspeed_enabled:
            raise RouteNotTaken(
                "the Trainer trains without DeepSpeed, and dsx.run serves it with DeepSpeed: give "
                "TrainingArguments(deepspeed=FILE) (--deepspeed FILE in most scripts), a JSON with "
                "ZeRO stage 0, 1, 2 or 3"
            )
        if trainer in self._session.trainers:
            raise ConfigError(
                "Trainer.train() is called a second time, and after the first one the Trainer "
                "holds the finished model: set max_steps or num_train_epochs to train longer, or "
                "start a new process from what save_model has written"
            )
        if trainer.args.auto_find_batch_size:
            raise ConfigError(
                "TrainingArguments(auto_find_batch_size=True) finds a size for each rank, and the "
                "clusters' have to be equal: set per_device_train_batch_size"
            )
        if trainer.args.save_on_each_node:
            raise ConfigError(
                "TrainingArguments(save_on_each_node=True): the ranks of a cluster share a "
                "directory; leave it out"
            )
        settings = self._settings()
        if settings.checkpoints.keep is not None:
            raise ConfigError(
                f"dsx.checkpoints.keep={settings.checkpoints.keep} would delete what the Trainer's "
                "checkpoint folders hold: leave it out and set TrainingArguments(save_total_limit)"
            )
        if settings.checkpoints.remote is not None and trainer.args.save_only_model:
            raise ConfigError(
                "TrainingArguments(save_only_model=True) saves nothing that a run goes on from, "
                f"which is what {REMOTE}={settings.checkpoints.remote!r} has copies of: leave one "
                "of them out"
            )
        if settings.divergence.max_rollbacks:
            raise ConfigError(
                f"dsx.divergence.max_rollbacks={settings.divergence.max_rollbacks} is not served "
                "with the Trainer, which counts steps and samples itself: leave it out; a run that "
                "has diverged ends, and the next start takes a checkpoint of before"
            )

    def evaluate(
        self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Evaluate the clusters' average; return cluster 0's metrics, by which the Trainer decides.

        Collective over all clusters while they train.
        """
        handle = handle_of(trainer)
        is_training = self._is_training(trainer)
        with self._averaged(trainer):
            metrics = original(*args, **kwargs)
        if not is_training or handle is None:
            return metrics
        numbers = {n: float(v) for n, v in metrics.items() if isinstance(v, (int, float))}
        return {**metrics, **handle.gather(numbers)[0]}  # one model, one decision on it

    def save_model(
        self,
        original: Callable[..., Any],
        trainer: Any,
        output_dir: str | None = None,
        _internal_call: bool = False,
    ) -> Any:
        """Save the clusters' average, where the script says or in this cluster's folder."""
        handle = handle_of(trainer)
        if handle is not None and handle.preemption.is_saving:
            return original(output_dir, _internal_call)  # at a step of this cluster's own
        with self._averaged(trainer):
            own = Path(trainer.args.output_dir).absolute()
            target = own if output_dir is None else Path(output_dir).absolute()
            world = current_world()
            if world is None or target == own or own in target.parents:
                return original(output_dir, _internal_call)
            save_beside(
                target,
                world,
                lambda to: original(str(to), _internal_call),
                trainer.args.should_save,
            )

    def save_checkpoint(
        self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Save, and delete what is older once all clusters have saved as far."""
        handle = handle_of(trainer)
        if handle is None:
            return original(*args, **kwargs)
        folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        if self._begun is not None and trainer.args.should_save:
            self._begun.write(folder)  # before the checkpoint is complete
        return self._saves_of(trainer, handle).save(folder, lambda: original(*args, **kwargs))

    def _saves_of(self, trainer: Any, handle: Handle) -> Saves:
        if trainer not in self._saves:
            world = current_world()
            assert world is not None
            self._saves[trainer] = saves = Saves(self._module, trainer, handle, world)
            saves.serve(self._settings().checkpoints)
        return self._saves[trainer]

    def _settings(self) -> Any:
        return self._session.settings

    def load_best_model(self, original: Callable[..., Any], trainer: Any) -> Any:
        """Go back to the best checkpoint, one for all clusters, which have ended training."""
        handle = handle_of(trainer)
        if handle is None:
            return original()
        handle.finish()
        best = Path(trainer.state.best_model_checkpoint)
        everyone = handle.gather(best.name)
        first = best.with_name(everyone[0])
        is_there = handle.gather(first.is_dir())
        if not all(is_there):
            raise ValueError(
                f"the clusters have found {', '.join(everyone)} best, and not all of them have "
                f"{first.name}: raise save_total_limit, or evaluate on the same data everywhere"
            )
        trainer.state.best_model_checkpoint = str(first)
        result = original()
        keep_exported(handle.loop)
        self._ended.append(trainer)
        return result

    def _end(self, trainer: Any) -> None:
        """Finish training and keep the average; once, whether the best was loaded or not."""
        handle = _require_handle(trainer)
        if trainer not in self._ended:
            handle.finish()
            keep_exported(handle.loop)
            self._ended.append(trainer)
        self._session.ended.append(handle)

    def _averaged(self, trainer: Any) -> AbstractContextManager[None]:
        """Return what holds the average, while there is another model to go back to."""
        handle = handle_of(trainer)
        is_training = self._is_training(trainer)
        return handle.averaged() if handle and is_training else contextlib.nullcontext()

    def _is_training(self, trainer: Any) -> bool:
        return handle_of(trainer) is not None and trainer.is_in_train and trainer not in self._ended

    def _load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(engine: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(engine, "dsx"):
                return original(engine, path, *args, **kwargs)
            folder = Path(path)
            if is_plain(folder) and holds_torch_states(folder):
                weights, self._weights = self._weights, {}
                begin_from_trainer(engine, folder, weights)
                return None
            strict = inspect.signature(original).bind(engine, path, *args, **kwargs)
            return engine.load_checkpoint(
                str(path), load_module_strict=strict.arguments.get("load_module_strict", True)
            )

        return load


def _require_handle(trainer: Any) -> Handle:
    handle = handle_of(trainer)
    if handle is None:
        raise RouteNotTaken(
            "the Trainer has made its model ready without deepspeed.initialize: nothing of it is "
            "exchanged; use the Trainer with TrainingArguments(deepspeed=FILE)"
        )
    return handle
