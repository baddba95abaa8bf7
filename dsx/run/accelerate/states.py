"""`save_state` and `load_state`: each cluster's own part of a folder, with the outer state.

What Accelerate saves goes to `<folder>/cluster_<m>/accelerate/`, with what a handle saves; a
DeepSpeed engine saves to `<folder>/cluster_<m>/pytorch_model/`. Both are written beside what was
there, and get their names once they are complete. What is loaded is the same in all clusters: of
one run, at one step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import MANIFEST, read_manifest
from dsx.checkpoint.health import tensors_of
from dsx.checkpoint.tags import cluster_directory, complete_tag
from dsx.comm.world import World, current_world
from dsx.engines.agreed_save import AgreedSave, survives
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.resume_point import choose
from dsx.run.accelerate.loop import Loop, Trained, on_all_ranks
from dsx.run.accelerate.parts import (
    TAG,
    State,
    common_states,
    complete_in,
    parts_to_load,
    put_back_whole,
    whole_states,
)
from dsx.run.accelerate.saves import bring
from dsx.run.replace import around
from dsx.training.manifest import manifest_of

logger = logging.getLogger(__name__)


def replace_states(loop: Loop, accelerator: Any) -> None:
    """Replace `save_state` and `load_state` of the class `Accelerator`."""

    def save_state(
        original: Any, self: Any, output_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Save, in every cluster at the same step; return the folder. Collective in the cluster."""
        trained, world = _trained(loop, self, "save_state"), current_world()
        if not trained or world is None:
            return original(self, output_dir, *args, **kwargs)
        settings = self.project_configuration
        base = (
            _next_folder(self, trained, world)
            if settings.automatic_checkpoint_naming
            else output_dir
        )
        base = _of_run(Path(base), world)
        loop.is_saving = True
        saves, handles = loop.saves_of(self), [one.handle for one in trained]
        saves.begin(cluster_directory(base, world.cluster_id), handles, _num_engines(trained))
        try:
            with _named(self):
                is_saved = _save(
                    trained, world, base, lambda to: original(self, str(to), *args, **kwargs)
                )
        finally:
            loop.is_saving = False
        saves.written(is_saved)
        limit = settings.total_limit if settings.automatic_checkpoint_naming else None
        if limit is not None:
            saves.delete_older(base, limit, is_saved)
        return str(base)

    def load_state(
        original: Any, self: Any, input_dir: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Load what all clusters have. Collective over all ranks of all clusters."""
        trained, world = _trained(loop, self, "load_state"), current_world()
        if not trained or world is None:
            return original(self, input_dir, *args, **kwargs)
        for one in trained:
            one.handle.beside.wait_together()  # what is being written may be what is to be loaded
        base = _bring(self, trained, world, input_dir)
        with _named(self):
            _load(trained, world, base, lambda at: original(self, str(at), *args, **kwargs))

    around(accelerator, "save_state", save_state)
    around(accelerator, "load_state", load_state)


def _bring(accelerator: Any, trained: list[Trained], world: World, asked: Any) -> Path:
    """Return the folder to load, which is fetched where a cluster lacks it. Collective over all."""
    handle, count = trained[0].handle, _num_engines(trained)
    if asked is None:
        _require_automatic(accelerator)
        if handle.remote is not None:
            held = _checkpoints(accelerator, world, count)
            by_name = {f"checkpoint_{number}": states for number, states in held.items()}
            bring(handle, world, _automatic_folder(accelerator), by_name)
        return _newest(accelerator, trained, world)
    base = _of_run(Path(asked), world)
    if handle.remote is not None:
        own = whole_states(complete_in(base, world), count)
        bring(handle, world, base.parent, {base.name: own} if own else {}, base.name)
    return base


def _trained(loop: Loop, accelerator: Any, what: str) -> list[Trained]:
    trained = list(loop.of(accelerator))
    if any(one.is_ended for one in trained):
        raise RuntimeError(
            f"accelerator.{what}() behind end_training(), where only the finished model is left: "
            f"call it before, or save the model with accelerator.save_model()"
        )
    return trained


def _save(
    trained: list[Trained], world: World, base: Path, of_accelerate: Callable[[Path], Any]
) -> bool:
    """Save all there is; return whether all of it could be written. Collective in the cluster."""
    directory, handle = cluster_directory(base, world.cluster_id), trained[0].handle
    engines = [one.model for one in trained if one.is_engine]
    asked: list[Any] = []

    def save() -> None:
        asked.extend(_save_own(trained, world, directory, engines, of_accelerate))

    is_saved = survives(save)
    is_saved = is_saved and all([e.save_checkpoint(str(base), t, **more) for e, t, more in asked])
    if is_saved and engines:
        handle.saved(directory / TAG)
    return is_saved


def _save_own(
    trained: list[Trained],
    world: World,
    directory: Path,
    engines: list[Any],
    of_accelerate: Callable[[Path], Any],
) -> list[Any]:
    """Save what no engine does; return what the engines were asked to."""
    handle = trained[0].handle
    with ExitStack() as stack:
        for one in trained:
            if not one.is_engine:
                stack.enter_context(one.handle.saving())
        with on_all_ranks("save_state"):
            is_later = not engines  # theirs are written behind this one, beside training
            saving = AgreedSave(handle, directory, TAG, world.rank == 0, is_later)
        if engines:
            with saving.part():
                put_back_whole(directory.parent, world, len(engines))
        with _engines_wait(engines, "save_checkpoint") as asked:
            saving.of_script(lambda: of_accelerate(saving.unfinished))
        for place, one in _places(trained, saving.unfinished):
            saving.do(lambda place=place, one=one: one.handle.write(place))
        _complete(saving, trained, world)
    return asked


def _complete(saving: AgreedSave, trained: list[Trained], world: World) -> None:
    """Give the folder its name, once all ranks have written to it. Collective in the cluster."""
    handle = trained[0].handle
    moments = [o for one in trained if not one.is_engine for o in _inner(one)]
    judged = gather_objects(handle.rollback.judge(tensors_of(moments)))
    manifest = manifest_of(handle, world, judged, is_preempted=False)

    def finish() -> None:
        complete_tag(saving.final.parent, TAG, manifest)

    if all(one.is_engine for one in trained):  # it is saved once theirs are
        saving.do(finish if world.rank == 0 else lambda: None)
    else:
        saving.complete(finish)


def _load(
    trained: list[Trained], world: World, base: Path, of_accelerate: Callable[[Path], Any]
) -> None:
    handle, count = trained[0].handle, _num_engines(trained)
    parts = (parts_to_load(handle, world, base, count) if count else None) or {TAG: TAG}
    _, tag = choose(handle.gather, world, base, parts[TAG])
    directory = cluster_directory(base, world.cluster_id) / tag
    if not tag.startswith(TAG) or not directory.is_dir():
        raise ValueError(f"{base} holds no complete state of this cluster: load an earlier one")
    saved = read_manifest(directory / MANIFEST)
    if saved["num_clusters"] != world.num_clusters:
        raise ValueError(
            f"{base} is of a run of {saved['num_clusters']} clusters, and its data was cut for as "
            f"many: some of it would be read twice by {world.num_clusters}, and some never; start "
            "as many clusters, or train on from what accelerator.save_model() has written"
        )
    if saved["num_ranks"] != world.world_size and world.rank == 0:
        logger.warning(
            "%s was saved by %d ranks of this cluster, which has %d now: random states and the "
            "order of the data are not those of before", base, saved["num_ranks"], world.world_size,
        )  # fmt: skip
    engines = [one.model for one in trained if one.is_engine]
    with _engines_wait(engines, "load_checkpoint") as asked:
        of_accelerate(directory)
    for engine, of_engine, more in asked:
        engine.load_checkpoint(str(base), parts.get(of_engine, of_engine), **more)
    for place, one in _places(trained, directory):
        one.handle.load(place)
        if one.first_step is not None:
            one.first_step.release()
    steps = handle.gather(handle.step)
    if any(step != saved["step"] for step in steps):
        raise ValueError(
            f"{base}: the engine's part is of step {handle.step} and what Accelerate has saved is "
            f"of step {saved['step']}: a cluster was killed while it saved there again; load an "
            "earlier one"
        )
    handle.keeping.loaded(directory, handle.step)


def _inner(one: Trained) -> list[Any]:
    return [optimizer.optimizer for optimizer in one.optimizers]


def _places(trained: list[Trained], directory: Path) -> list[tuple[Path, Trained]]:
    """Return where the outer state of each model lies that is no engine's."""
    own = [one for one in trained if not one.is_engine]
    return [(directory / f"model_{i}" if i else directory, one) for i, one in enumerate(own)]


@contextmanager
def _engines_wait(
    engines: list[Any], name: str
) -> Generator[list[tuple[Any, str, dict[str, Any]]], None, None]:
    """Note what Accelerate asks of the engines, which is done behind it, in their own folder."""
    asked: list[tuple[Any, str, dict[str, Any]]] = []
    originals = [getattr(engine, name) for engine in engines]

    def waiting(engine: Any) -> Callable[..., None]:
        def note(folder: str, tag: str, **more: Any) -> None:
            asked.append((engine, tag, more))

        return note

    for engine in engines:
        setattr(engine, name, waiting(engine))
    try:
        yield asked
    finally:
        for engine, original in zip(engines, originals, strict=True):
            setattr(engine, name, original)


@contextmanager
def _named(accelerator: Any) -> Generator[None, None, None]:
    """Let Accelerate take the folder that it is given."""
    settings = accelerator.project_configuration
    before, settings.automatic_checkpoint_naming = settings.automatic_checkpoint_naming, False
    try:
        yield
    finally:
        settings.automatic_checkpoint_naming = before


def _of_run(folder: Path, world: World) -> Path:
    """Return the folder that all clusters share, where a script names its cluster's own."""
    own = cluster_directory(folder.parent, world.cluster_id)
    return folder.parent if folder.name == own.name else folder


def _checkpoints(accelerator: Any, world: World, num_engines: int) -> dict[int, list[State]]:
    """Return what folders of automatic names hold of this cluster, by number.

    With the part of each engine, which saves behind Accelerate, at the same step.
    """
    base = _automatic_folder(accelerator)
    found = {path: re.fullmatch(r"checkpoint_(\d+)", path.name) for path in base.glob("*")}
    return {
        int(name[1]): states
        for path, name in found.items()
        if name and (states := whole_states(complete_in(path, world), num_engines))
    }


def _next_folder(accelerator: Any, trained: list[Trained], world: World) -> Path:
    number = accelerator.save_iteration
    if number in _checkpoints(accelerator, world, _num_engines(trained)):
        raise ValueError(
            f"checkpoint_{number} exists already in {accelerator.project_dir}/checkpoints; set "
            "ProjectConfiguration(iteration=...) to the number to go on with"
        )
    return _automatic_folder(accelerator) / f"checkpoint_{number}"


def _num_engines(trained: list[Trained]) -> int:
    return sum(one.is_engine for one in trained)


def _require_automatic(accelerator: Any) -> None:
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")


def _automatic_folder(accelerator: Any) -> Path:
    return Path(accelerator.project_dir) / "checkpoints"


def _newest(accelerator: Any, trained: list[Trained], world: World) -> Path:
    """Return the folder of the highest number that all clusters have. Collective over all.

    As of the same step and run.
    """
    own = _checkpoints(accelerator, world, _num_engines(trained))
    everyone: list[dict[int, list[State]]] = [
        dict(told) for told in trained[0].handle.gather(sorted(own.items()))
    ]
    of_all = set[int].intersection(*map(set, everyone))
    common = {number for number in of_all if common_states(held[number] for held in everyone)}
    if common and (newer := sorted(n for n in of_all if n > max(common))) and world.rank == 0:
        logger.warning(
            "%s: checkpoints %s are not of one step and run in all clusters, and checkpoint_%d is "
            "loaded", _automatic_folder(accelerator), newer, max(common),
        )  # fmt: skip
    if not common:
        have = "; ".join(f"cluster {m}: {sorted(h) or 'none'}" for m, h in enumerate(everyone))
        raise ValueError(
            f"no checkpoint in {accelerator.project_dir}/checkpoints is complete in all clusters "
            f"({have}): start without load_state()"
        )
    return _automatic_folder(accelerator) / f"checkpoint_{max(common)}"
