"""A Trainer's saves: the folder around dsx's tag, what it deletes, and what comes from elsewhere.

`checkpoint-<step>` is complete once all clusters have the tag in it. What the Trainer deletes then
goes at once; with `checkpoints.beside_training` or a remote place it waits until all clusters hold
the whole folder (training/whole.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsx.checkpoint.checksums import name_of
from dsx.checkpoint.remote import open_remote
from dsx.checkpoint.tags import cluster_directory, complete_tags
from dsx.comm.world import World
from dsx.config.checkpoints import CheckpointsConfig
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.resume_point import choose
from dsx.run.hugging_face.states import show_to_plain
from dsx.run.replace import original_of
from dsx.training.handle import Handle
from dsx.training.keeping import is_deleted
from dsx.training.whole import Whole, find_inner_damage, remove


class Saves:
    """One Trainer's; `module` is `transformers.trainer`."""

    def __init__(self, module: Any, trainer: Any, handle: Handle, world: World) -> None:
        self._trainer, self._handle, self._world = trainer, handle, world
        is_function = hasattr(module, "rotate_checkpoints")  # of version 5, else a method
        self._owner = module if is_function else trainer
        self._name = "rotate_checkpoints" if is_function else "_rotate_checkpoints"
        told = handle.rollback.saved_whole, handle.not_saved
        self._whole = Whole(world.rank == 0, self._show, *told)
        self._is_later = False

    def serve(self, checkpoints: CheckpointsConfig) -> None:
        """Let deletions wait where a save is not over as it returns; before the first one."""
        self._is_later = checkpoints.is_later
        if self._is_later:
            self._handle.keeping.serve_library(whole=self._whole)

    def save(self, folder: Path, save: Callable[[], Any]) -> Any:
        """Save; delete what is older once all clusters have saved as far. On all ranks.

        Collective over all clusters where that is at once.
        """
        handle = self._handle
        handle.beside.settle()
        handle.keeping.begin()
        self._whole.begin(folder, num_tags=1)
        with self._noting_deletions() as old:
            result = save()
        if self._is_later:
            gather_objects(None)  # all ranks have written what is the Trainer's
            self._whole.written()
            for path in old:
                handle.keeping.put_off(path, partial(remove, path))
            return result
        if self._trainer.args.should_save:
            show_to_plain(folder, handle.cluster_id)
        if self._trainer.args.save_total_limit and not handle.preemption.is_saving:
            own = cluster_directory(folder, handle.cluster_id)
            if all(handle.gather(bool(complete_tags(own)))):
                for path in old:
                    is_deleted(partial(remove, path))
        return result

    def _show(self, folder: Path) -> None:
        show_to_plain(folder, self._handle.cluster_id)

    @contextmanager
    def _noting_deletions(self) -> Generator[list[Path], None, None]:
        """Note what the Trainer would delete, and delete nothing."""
        owner, name = self._owner, self._name
        rotate, old = original_of(owner, name), list[Path]()
        scope = rotate.__globals__
        original_of(SimpleNamespace(**scope), "shutil")

        def keep(path: Any, *args: Any, **kwargs: Any) -> None:
            old.append(Path(path).absolute())

        def note(*args: Any, **kwargs: Any) -> None:
            before = scope["shutil"]
            scope["shutil"] = SimpleNamespace(rmtree=keep)
            try:
                rotate(*args, **kwargs)
            finally:
                scope["shutil"] = before

        setattr(owner, name, note)
        try:
            yield old
        finally:
            setattr(owner, name, rotate)


def bring(
    output_dir: str, asked: str | bool | None, world: World, checkpoints: CheckpointsConfig
) -> None:
    """Fetch the newest whole folder of all clusters where one lacks it, or the one asked for.

    Where any cluster resumes. Collective over all ranks of all clusters; ValueError where a remote
    place cannot be read and nothing is on the disk.
    """
    remote, own = open_remote(checkpoints), Path(output_dir).absolute()
    if remote is None:
        return
    named = None if asked is None or str(asked).lower() == "true" else Path(str(asked)).absolute()
    is_elsewhere = named is not None and named.parent not in (own, own.parent)
    tag = None if named is None else named.name
    told = world.rendezvous.gather("what is fetched", [asked is not None, is_elsewhere, tag])
    if not any(is_asked for is_asked, *_ in told) or any(other for _, other, _ in told):
        return
    wanted = next((of for *_, of in told if of is not None), None)
    base = own.parent

    def outer_state_of(tag: str) -> str | None:
        folder = cluster_directory(base, world.cluster_id) / tag
        return find_inner_damage(folder, world.rank, world.world_size)

    def gather(value: Any) -> list[Any]:
        return world.rendezvous.gather("whole checkpoints", value)

    try:
        source, found = choose(gather, world, base, wanted, also=outer_state_of, remote=remote)
    except FileNotFoundError:
        return  # what there is otherwise is looked at next
    folder = cluster_directory(base, source) / found
    plain = folder.with_name(name_of(found))
    if world.rank == 0:
        if folder != plain and not plain.exists():
            folder.rename(plain)
        show_to_plain(plain, world.cluster_id)
    gather_objects(None)  # nobody looks before
