"""A Trainer's checkpoints while it trains: the averaged model, beside the outer state of each rank.

`<dirpath>/cluster_<m>/X.ckpt` is what Lightning loads, in the place where it would be but for
`cluster_<m>`. Where a strategy writes a folder (DeepSpeed, ModelParallelStrategy), that folder is
the tag with the outer state. Where it writes a file, the tag is `X.ckpt.dsx` and has the file,
which `X.ckpt` links to: a run that is killed while it saves has both of one step, or none.

What was saved holds the average, as evaluation saw it; a cluster that goes on from it takes its own
weights back from the outer state.

With `checkpoints.beside_training` the outer state, and a file of Lightning's, are written while
training goes on: `X.ckpt` is there once all of it is. What a ModelCheckpoint deletes then, or with
a remote place, waits until all clusters hold what comes in its place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import MANIFEST
from dsx.checkpoint.health import tensors_of
from dsx.checkpoint.tags import complete_tag
from dsx.config.files import ConfigError
from dsx.engines.agreed_save import AgreedSave, survives
from dsx.engines.cluster_collectives import gather_objects, meet_in_cluster
from dsx.run.folders import move_into
from dsx.run.lightning.fit import Fit, fit_of, has_engine
from dsx.run.lightning.hooks import around, modules_of
from dsx.run.lightning.own_file import OwnFile
from dsx.run.lightning.places import own_place
from dsx.training.keeping import is_deleted
from dsx.training.manifest import manifest_of

FILE = "lightning.ckpt"
SUFFIX = ".dsx"
_OF_PROGRESS = ("epoch", "global_step", "loops", "callbacks", "lr_schedulers")


def replace_checkpoints(root: str) -> None:
    """Let a Trainer save with the outer state, and delete once all clusters have the next one."""
    module = modules_of(root)
    around(module("trainer.trainer").Trainer, "save_checkpoint", _save)
    callback = module("callbacks.model_checkpoint").ModelCheckpoint
    around(callback, "_remove_checkpoint", _remove)
    around(callback, "file_exists", _exists)


def writes_folder(strategy: Any) -> bool:
    """Whether a strategy's checkpoint is a folder that all ranks write to."""
    return has_engine(strategy) or bool(getattr(strategy, "_save_distributed_checkpoint", False))


def writes_alone(strategy: Any) -> bool:
    """Whether the first rank of a cluster writes a strategy's file, and no rank waits for it.

    Others (ModelParallelStrategy) begin with a collective even where they write one file.
    """
    names = {cls.__name__ for cls in type(strategy).__mro__}
    return not writes_folder(strategy) and bool(names & {"DDPStrategy", "SingleDeviceStrategy"})


def tag_of(path: Path, strategy: Any) -> str:
    """Return the name of the tag that a checkpoint is, or has beside it."""
    return path.name if writes_folder(strategy) else f"{path.name}{SUFFIX}"


def _save(
    original: Callable[..., Any],
    trainer: Any,
    filepath: Any,
    weights_only: bool | None = None,
    storage_options: Any = None,
) -> None:
    """Save the average, with the outer state while training goes on. On all ranks.

    Collective over all clusters while they train, but where the run is told to end.
    """
    fit = fit_of(trainer)
    if fit is None or ("://" in str(filepath) and not fit.is_training):
        original(filepath, weights_only, storage_options)
        return
    if "://" in str(filepath):
        raise ConfigError(
            f"Trainer.save_checkpoint({str(filepath)!r}) in training is not on a file system, "
            "where the outer state beside it has to be: give a local or a mounted folder"
        )
    if not fit.is_training:
        _save_beside(original, trainer, fit, Path(filepath), (weights_only, storage_options))
        return
    handle = fit.require_handle()
    path = own_place(trainer.strategy.broadcast(str(filepath)), fit.world.cluster_id)
    with nullcontext() if handle.preemption.is_saving else handle.averaged():
        if weights_only and not has_engine(trainer.strategy):
            original(str(path), weights_only, storage_options)
            fit.is_saved = True
        else:
            _Tag(trainer, fit, path, storage_options).write()


class _Tag:
    """One checkpoint from which the run can go on."""

    def __init__(self, trainer: Any, fit: Fit, path: Path, storage_options: Any) -> None:
        self._trainer, self._fit, self._path = trainer, fit, path
        self._options = storage_options
        self._progress: dict[str, Any] = {}

    def write(self) -> None:
        """Write it, or once more where `finish()` has applied what was under way."""
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(False)
        if not self._progress:
            self._progress = {n: checkpoint[n] for n in _OF_PROGRESS if n in checkpoint}
        checkpoint.update(self._progress)
        self._fit.require_handle().beside.settle()
        self._fit.require_handle().keeping.begin()
        if has_engine(self._trainer.strategy):
            self._fit.is_saved = self._write_engine(checkpoint)
        else:
            self._fit.is_saved = survives(lambda: self._write_outer(checkpoint))

    def _write_engine(self, checkpoint: dict[str, Any]) -> bool:
        """Let DeepSpeed write the tag, whose save carries the outer state and is made again."""
        strategy = self._trainer.strategy
        of_engine = ("state_dict", "optimizer_states")
        state = {name: value for name, value in checkpoint.items() if name not in of_engine}
        handle = self._fit.require_handle()
        handle.on_preemption(lambda _: state)  # asked for this save alone
        return strategy.model.save_checkpoint(
            str(self._path.parents[1]),
            tag=self._path.name,
            client_state=state,
            exclude_frozen_parameters=strategy.exclude_frozen_parameters,
        )

    def _write_outer(self, checkpoint: dict[str, Any]) -> None:
        strategy, world = self._trainer.strategy, self._fit.world
        handle = self._fit.require_handle()
        directory, tag = self._path.parent, tag_of(self._path, strategy)
        saving = AgreedSave(handle, directory, tag, world.rank == 0, may_be_later=True)
        if saving.has_put_back and not writes_folder(strategy):
            with saving.part():
                link(directory / tag / FILE, self._path)
        place = str(saving.unfinished if writes_folder(strategy) else saving.unfinished / FILE)
        file = self._own_file(checkpoint, place)
        if writes_alone(strategy):
            saving.of_script(lambda: handle.beside.write(file))
        else:  # together, by collectives of the training's own
            saving.of_script(file.write)
        saving.do(lambda: handle.write(saving.unfinished, self.write))
        judged = gather_objects(handle.rollback.judge(tensors_of(strategy.optimizers)))
        manifest = manifest_of(handle, world, judged)

        def finish() -> None:
            complete_tag(directory, tag, manifest)
            if not writes_folder(strategy):
                link(directory / tag / FILE, self._path)

        saving.complete(finish)

    def _own_file(self, checkpoint: dict[str, Any], place: str) -> OwnFile:
        trainer, options = self._trainer, self._options

        def write(held: Any) -> None:
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            trainer.strategy.save_checkpoint(held, place, options)

        return OwnFile(checkpoint, write, trainer.is_global_zero)


def link(file: Path, path: Path) -> None:
    """Let `path` be a file of a tag, at once; a copy where there are no links."""
    beside = path.with_name(f".{path.name}.link")
    beside.unlink(missing_ok=True)
    try:
        os.link(file, beside)
    except OSError:
        shutil.copyfile(file, beside)
    os.replace(beside, path)


def _save_beside(
    original: Callable[..., Any], trainer: Any, fit: Fit, path: Path, rest: tuple[Any, Any]
) -> None:
    """Save the finished model where all clusters may name one place: each beside it first."""
    own = path.with_name(f".{path.name}.cluster_{fit.world.cluster_id}")
    original(str(own), *rest)
    if trainer.is_global_zero:
        if own.is_dir():
            if path.is_file():
                path.unlink()
            move_into(own, path)
        else:
            os.replace(own, path)
    meet_in_cluster("save a checkpoint")


def _remove(original: Callable[..., Any], callback: Any, trainer: Any, filepath: str) -> None:
    """Delete a checkpoint once all clusters have saved what follows it; it stays where one could
    not. Collective over all clusters.
    """
    fit = fit_of(trainer)
    if fit is None:
        original(trainer, filepath)
        return
    tag = Path(filepath).with_name(tag_of(Path(filepath), trainer.strategy))
    handle = fit.require_handle() if fit.is_training else None

    def delete() -> None:
        if trainer.is_global_zero:
            (tag / MANIFEST).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                if tag != Path(filepath):
                    shutil.rmtree(tag)
        original(trainer, filepath)

    if fit.resume == tag:
        return  # what the run has come from stays, as Lightning has it
    if handle is not None and not handle.preemption.is_saving:
        is_tag = not callback.save_weights_only or has_engine(trainer.strategy)
        if fit.puts_off and is_tag:
            handle.keeping.put_off(tag, delete)
            return
        if not all(handle.gather(fit.is_saved)):
            return  # what was not saved has been told
    is_deleted(delete)


def _exists(original: Callable[..., Any], callback: Any, filepath: Any, trainer: Any) -> bool:
    """Say whether a name is taken, also by what is being written beside training; in any cluster.

    So all clusters choose one name. Collective over all of them while they train.
    """
    fit = fit_of(trainer)
    if fit is None or not fit.is_training:
        return bool(original(filepath, trainer))
    handle = fit.require_handle()
    handle.beside.settle()
    is_taken = bool(original(filepath, trainer))
    return is_taken if handle.preemption.is_saving else any(handle.gather(is_taken))
