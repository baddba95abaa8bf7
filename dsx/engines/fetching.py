"""Checkpoints that a cluster lacks on its disk, from a remote place (`checkpoints.remote`).

Tags there are within reach like those on the disk, which come first. The one that all clusters
load is fetched where it is not on the disk: its ranks share out the files, look over what has come,
and the tag gets its name once all of it is there and intact.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import DAMAGED, MANIFEST, UNFINISHED, find_damage, read_manifest
from dsx.checkpoint.own_part import FOLDER, OwnPart, without_part
from dsx.checkpoint.remote import Pace, Remote, is_tag_name, names_in
from dsx.checkpoint.tags import cluster_directory, has_same_content, sync_to_disk
from dsx.comm.world import World
from dsx.core.progress import SOON, Progress
from dsx.engines.cluster_collectives import from_first, gather_objects

logger = logging.getLogger(__name__)
_FAR = "is_remote"  # in a manifest, of a tag that the disk does not hold
Manifests = dict[str, dict[str, Any]]


class Fetching:
    """One rank's part in one load; every rank of a cluster calls the same. Nothing without one."""

    def __init__(self, remote: Remote | None, world: World, base: Path) -> None:
        self._remote, self._world, self._base = remote, world, base
        self.trouble = ""  # why the remote place could not be read, the same on all ranks

    def within_reach(self, on_disk: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return `tags_within_reach`, and with them what is at the remote place alone.

        Collective in the cluster.
        """
        if self._remote is None:
            return [*on_disk]
        far, self.trouble = from_first(self._list() if self._world.rank == 0 else ({}, ""))
        own: Manifests = dict(on_disk[0])
        others: dict[str, Manifests] = dict(on_disk[1])
        _add(own, far.pop(self._world.cluster_id, {}), [own])
        for cluster, tags in sorted(far.items()):
            known = others.setdefault(str(cluster), {})
            _add(known, tags, [own, *others.values()])
        return [own, {cluster: tags for cluster, tags in others.items() if tags}]

    def is_far(self, manifest: Mapping[str, Any]) -> bool:
        """Whether a tag, of those within reach, is at the remote place alone."""
        return bool(manifest.get(_FAR))

    @property
    def is_on(self) -> bool:
        """Whether there is a remote place, in all clusters."""
        return self._remote is not None

    def begin(self, cluster: int, tag: str) -> Bringing:
        """Begin to bring a tag to the disk, on a thread. Collective in the cluster.

        ValueError for what is no checkpoint's name, as `Remote.tags` gives none.
        """
        remote = self._remote
        assert remote is not None
        if not is_tag_name(tag):
            raise ValueError(f"{tag!r} is no checkpoint's name, and nothing is fetched: rename it")
        directory = cluster_directory(self._base, cluster)
        unfinished = directory / f"{tag}.for_{self._world.cluster_id}{UNFINISHED}"
        where = remote.place(cluster, tag)
        told: tuple[bytes, str | None] = b"", None
        if self._world.rank == 0:
            logger.warning("%s is fetched: %s does not hold it", where, directory)

            def prepare() -> bytes:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                return remote.manifest(cluster, tag)

            told = _attempt(prepare, where)
        manifest, trouble = from_first(told)

        def bring(pace: Pace) -> None:
            if trouble is not None:
                raise OSError(trouble)
            self._bring(remote, cluster, tag, manifest, unfinished, pace)

        final = directory / tag
        return Bringing(bring, where, manifest, unfinished, final, self._world, remote.part)

    def _bring(
        self, remote: Remote, cluster: int, tag: str, manifest: bytes, unfinished: Path, pace: Pace
    ) -> None:
        """Fetch this rank's share of the files, the largest shared out first."""
        where, rank = remote.place(cluster, tag), self._world.rank
        sizes = names_in(manifest, where)
        names = sorted(sizes, key=lambda name: (-(sizes[name] or 0), name))
        own = names[rank :: self._world.world_size]
        total = sum(sizes[name] or 0 for name in own)
        progress = Progress(f"fetching {where}", total, rank == 0, first_seconds=SOON)

        def moved(num_bytes: int) -> None:
            pace(num_bytes)
            progress.moved(num_bytes)

        remote.fetch(cluster, tag, own, unfinished, moved)

    def _list(self) -> tuple[dict[int, Manifests], str]:
        """Return the tags there by cluster, and "", or why they cannot be read."""
        remote = self._remote
        assert remote is not None
        found, trouble = _attempt(
            lambda: {cluster: remote.tags(cluster) for cluster in sorted(remote.clusters())},
            remote.url,
        )
        if trouble is not None:
            logger.warning("%s; what is on the disk is all that there is", trouble)
            return {}, trouble
        assert found is not None
        return found, ""


class Bringing:
    """A tag on its way to the disk, this rank's share of it."""

    def __init__(
        self,
        bring: Callable[[Pace], None],
        where: str,
        manifest: bytes,
        unfinished: Path,
        final: Path,
        world: World,
        part: OwnPart | None,
    ) -> None:
        self._where, self._manifest, self._world = where, manifest, world
        self._part = part
        self._unfinished, self._final = unfinished, final
        self._trouble: str | None = None
        self._heard = time.monotonic()  # when bytes came last
        self._is_given_up = False

        def run() -> None:
            _, trouble = _attempt(lambda: bring(self._came), where)
            if not self._is_given_up:
                self._trouble = trouble

        self._thread = threading.Thread(target=run, name="dsx-fetch", daemon=True)
        self._thread.start()

    def is_over(self, seconds: float) -> bool:
        """Wait for this rank's share so long at most; return whether it has come, or failed.

        It has failed, too, where nothing has come for `clusters.deadline_seconds`.
        """
        self._thread.join(seconds)
        quiet, deadline = time.monotonic() - self._heard, self._world.deadline_seconds
        if self._thread.is_alive() and not self._is_given_up and quiet > deadline:
            self._is_given_up = True
            self._trouble = (
                f"nothing came for {deadline:g} s from {self._where} (checkpoints.remote, "
                "clusters.deadline_seconds)"
            )
            logger.warning("rank %d: %s; it is not waited for", self._world.rank, self._trouble)
        return self._is_given_up or not self._thread.is_alive()

    def _place(self) -> None:
        """Give the engine its own part, if it keeps one elsewhere."""
        if self._part is not None:
            self._part.place(self._final.name, self._unfinished / FOLDER)
            shutil.rmtree(self._unfinished / FOLDER, ignore_errors=True)
            (self._unfinished / MANIFEST).write_bytes(without_part(self._manifest))

    def _came(self, num_bytes: int) -> None:
        if self._is_given_up:
            raise OSError("too late: it is not waited for any more")
        self._heard = time.monotonic()

    def complete(self) -> str | None:
        """Give the tag its name, if all is there and intact; return what this rank finds wrong.

        Once it is over on all ranks. Collective in the cluster.
        """
        trouble, rank, where = self._trouble, self._world.rank, self._where
        if not any(gather_objects(trouble)):
            if rank == 0:
                path = self._unfinished / MANIFEST
                _, trouble = _attempt(lambda: path.write_bytes(self._manifest), where)
            from_first(None)
            trouble = trouble or find_damage(self._unfinished, rank, self._world.world_size)
        is_good = not any(gather_objects(trouble))
        if rank == 0:
            if is_good:
                _, trouble = _attempt(
                    lambda: _name(self._unfinished, self._final, self._place), where
                )
            shutil.rmtree(self._unfinished, ignore_errors=True)
        from_first(None)  # nobody reads before
        return trouble


def _add(known: Manifests, far: Mapping[str, Any], held: Sequence[Manifests]) -> None:
    """Add what is at the remote place to what is on the disk, as far as nobody holds it there."""
    on_disk = [manifest for tags in held for manifest in tags.values() if DAMAGED not in manifest]
    for tag, manifest in far.items():
        is_free = tag not in known or DAMAGED in known[tag]
        is_new = not any(has_same_content(manifest, other) for other in on_disk)
        if DAMAGED not in manifest and is_free and is_new:
            known[tag] = {**manifest, _FAR: True}


def _attempt(work: Callable[[], Any], where: str) -> tuple[Any, str | None]:
    """Return what it gives, and what is wrong: each file system has errors of its own."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - the other ranks wait for what is told here
        return None, f"{where} cannot be read: {type(error).__name__}: {error}"


def _name(unfinished: Path, final: Path, place: Callable[[], None] = lambda: None) -> None:
    """Give what was fetched its name; another cluster of this disk may have been first.

    Behind `place`, which takes out what lies elsewhere.
    """
    if final.resolve().parent != unfinished.parent.resolve():
        raise ValueError(f"{final} does not lie in {unfinished.parent}: nothing there is touched")
    place()
    for path in unfinished.rglob("*"):
        sync_to_disk(path)
    if _is_complete(final):
        return
    shutil.rmtree(final, ignore_errors=True)
    try:
        unfinished.rename(final)
    except OSError:
        if not _is_complete(final):
            raise
    sync_to_disk(final.parent)


def _is_complete(tag: Path) -> bool:
    manifest = tag / MANIFEST
    return manifest.is_file() and DAMAGED not in read_manifest(manifest)
