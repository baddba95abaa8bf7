"""What `save_state` leaves behind: folders that are whole, older ones that go, and what is fetched.

A cluster's part, `<folder>/cluster_<m>`, is whole once what Accelerate and each engine have saved
there is complete (training/whole.py). `ProjectConfiguration(total_limit)` deletes at once; with
`checkpoints.beside_training` or a remote place that waits until all clusters hold the newer one.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import DAMAGED, MANIFEST
from dsx.checkpoint.places import by_tag
from dsx.checkpoint.remote import Remote
from dsx.checkpoint.tags import cluster_directory
from dsx.comm.world import World
from dsx.config.checkpoints import CheckpointsConfig
from dsx.engines.cluster_collectives import from_first, gather_objects
from dsx.engines.resume_point import choose
from dsx.run.accelerate.parts import State, common_states
from dsx.training.handle import Handle
from dsx.training.keeping import is_deleted
from dsx.training.whole import Whole, find_inner_damage, remove

_STAGING = ".dsx_fetched"
logger = logging.getLogger(__name__)


class Saves:
    """Those of one Accelerator, whose models `handles` are of; the first one's counts them."""

    def __init__(self, handle: Handle, world: World, checkpoints: CheckpointsConfig) -> None:
        self._handle, self._world = handle, world
        self._is_later = checkpoints.is_later
        told = handle.rollback.saved_whole, handle.not_saved
        self._whole = Whole(world.rank == 0, lambda folder: None, *told)

    def begin(self, folder: Path, handles: Collection[Handle], num_engines: int) -> None:
        """Take that a save to this cluster's folder begins. On all ranks."""
        for handle in handles:
            if self._is_later:
                handle.keeping.serve_library(by_tag, self._whole)
            handle.beside.settle()
        self._handle.keeping.begin()
        self._whole.begin(folder, 1 + num_engines)

    def written(self, is_saved: bool) -> None:
        """Take that Accelerate has written its files, and whether; engines may still write."""
        if self._is_later and is_saved:
            gather_objects(None)  # on all ranks
            self._whole.written()

    def delete_older(self, newest: Path, limit: int, is_saved: bool) -> None:
        """Delete what this cluster holds of automatic names, but for the last few.

        Once all clusters have saved; collective over all of them where that is at once.
        """
        if self._is_later:
            for path in older(newest, self._world.cluster_id, limit):
                own = cluster_directory(path, self._world.cluster_id)
                self._handle.keeping.put_off(own, partial(remove_part, own))
        elif all(self._handle.gather(is_saved)) and self._world.rank == 0:
            for path in older(newest, self._world.cluster_id, limit):
                is_deleted(partial(remove_part, cluster_directory(path, self._world.cluster_id)))


def older(newest: Path, cluster_id: int, limit: int) -> list[Path]:
    """Return the folders of automatic names that hold something of a cluster, but the last few."""
    held = [
        path
        for path in newest.parent.glob("checkpoint_*")
        if cluster_directory(path, cluster_id).is_dir()
    ]
    numbered = sorted(held, key=lambda path: int(path.name.rpartition("_")[2]))
    return numbered[: max(len(numbered) - limit, 0)]


def remove_part(own: Path) -> None:
    """Delete a cluster's part of a folder, and that with the last one's."""
    remove(own)
    with suppress(OSError):  # another cluster's is there still
        own.parent.rmdir()


def bring(
    handle: Handle,
    world: World,
    base: Path,
    on_disk: Mapping[str, Sequence[State]],
    wanted: str | None = None,
) -> None:
    """Fetch the newest folder below `base` that is whole in all clusters, where one lacks it.

    Or the one that is `wanted`. `on_disk` are the states that this cluster has complete, by folder;
    one that is there in all clusters counts if they have a state in common. Collective over all
    ranks of all clusters; ValueError where a remote place cannot be read, and no folder is on the
    disks of all.
    """
    remote = handle.remote
    if remote is None:
        return
    far, trouble = from_first(_held_by(remote, world) if world.rank == 0 else ({}, ""))
    everyone = handle.gather([from_first({**on_disk}), far, trouble])
    names = {name for own, there, _ in everyone for name in (*own, *there)}
    for name in [wanted] if wanted else sorted(names, key=_number, reverse=True):
        if common_states(own.get(name, []) for own, *_ in everyone):
            return
        if all(name in own or name in there for own, there, _ in everyone):
            try:
                _fetch(handle, world, base, name)
            except ValueError as error:
                if world.rank == 0:
                    advice = _advice([there.get(name) for _, there, _ in everyone], base / name)
                    logger.warning("%s is not taken: %s%s", base / name, error, advice)
            else:
                return
    for cluster, (*_, why) in enumerate(everyone):
        if why:
            raise ValueError(
                f"cluster {cluster}: {remote.url} cannot be read ({why}), and the disks of all "
                f"clusters have no state in common below {base}"
            )


def _advice(there: list[list[Any] | None], folder: Path) -> str:
    """Say what to do where a folder on a disk hides one that the remote places have of all."""
    first = there[0]
    if first is None or any(one != first for one in there):
        return ""
    return (
        f"; at the remote place all clusters have it as of step {first[0]}: to load that, move "
        f"{folder} away on the disks that hold it as of another step"
    )


def _held_by(remote: Remote, world: World) -> tuple[dict[str, list[Any]], str]:
    """Return what is whole of this cluster at the remote place, and why that is not known.

    By name, with its step and its run.
    """
    try:
        found = remote.tags(world.cluster_id)
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        return {}, f"{type(error).__name__}: {error}"
    whole = {tag: told for tag, told in found.items() if DAMAGED not in told}
    return {tag: [told["step"], told.get("session")] for tag, told in whole.items()}, ""


def _number(name: str) -> int:
    number = name.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


def _fetch(handle: Handle, world: World, base: Path, name: str) -> None:
    """Fetch a folder, and look it over where it is on the disk. Collective over all clusters."""
    staging = base / _STAGING
    held = cluster_directory(base / name, world.cluster_id)
    own = cluster_directory(staging, world.cluster_id)

    def prepare() -> None:
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        if (held / MANIFEST).is_file():
            (own / name).symlink_to(held.absolute(), target_is_directory=True)

    def outer_state_of(tag: str) -> str | None:
        return find_inner_damage(own / tag, world.rank, world.world_size)

    try:
        _on_firsts(handle, world, prepare)
        _, found = choose(
            handle.gather, world, staging, name, also=outer_state_of, remote=handle.remote
        )

        def place() -> None:
            if not (own / found).is_symlink():
                remove(held)
                held.parent.mkdir(parents=True, exist_ok=True)
                (own / found).rename(held)

        _on_firsts(handle, world, place)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    finally:
        if world.rank == 0:
            shutil.rmtree(own, ignore_errors=True)
            with suppress(OSError):
                staging.rmdir()


def _on_firsts(handle: Handle, world: World, work: Callable[[], None]) -> None:
    """Let the first rank of each cluster do it, and nobody go on before. Collective over all.

    ValueError on all ranks of all clusters where one cannot.
    """
    trouble = ""
    if world.rank == 0:
        try:
            work()
        except OSError as error:
            trouble = f"{error.strerror or error} ({error.filename})"
    told = handle.gather(trouble)
    if wrong := [f"cluster {m}: {why}" for m, why in enumerate(told) if why]:
        raise ValueError("; ".join(wrong))
