"""Checkpoints at a remote place, by fsspec: copied there and from there, complete or not at all.

`<url>/cluster_<m>/<tag>/` holds what the tag's directory does. The manifest is written last, so
that whatever has none is not complete, and is no checkpoint. What a tag held before it is written
again stays as `<tag>.replaced`, as it does on a disk, by a copy that the other side makes.

Each file is copied in chunks, before which `pace` is asked: it counts, waits, or raises to end it.
What a file system raises where it cannot be reached is of many kinds, not all of them OSErrors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from dsx.checkpoint.checksums import (
    DAMAGED,
    MANIFEST,
    REPLACED,
    UNFINISHED,
    files_below,
    files_of,
    manifest_of_text,
)
from dsx.checkpoint.own_part import FOLDER, OwnPart, files_of_part, sizes_of_part, with_part
from dsx.checkpoint.places import Lies, by_cluster
from dsx.checkpoint.tags import has_same_content
from dsx.config.checkpoints import REMOTE, CheckpointsConfig, check_url
from dsx.config.files import ConfigError

logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 20
Pace = Callable[[int], object]


class Changed(Exception):
    """A tag was written again, marked or deleted on the disk while it was being copied."""


def as_it_comes(num_bytes: int) -> None:
    """Copy without a limit and without counting."""


class Remote:
    """The checkpoints below one URL; `setting` is what gave it, for messages.

    ValueError says what is missing for such a URL. One that cannot be reached now is tried again
    where it is used, which then raises what its file system does. Any one thread at a time.
    """

    def __init__(self, url: str, setting: str) -> None:
        self.url = url.rstrip("/")
        self._given = url, setting
        self._told: set[str] = set()  # names that are none, which a line has named
        self.part: OwnPart | None = None  # what the engine keeps elsewhere of each tag
        self.lies: Lies = by_cluster  # on the disk; at the remote place always by cluster
        try:
            _ = self._opened
        except ValueError:
            raise
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            why = f"{type(error).__name__}: {error}"
            logger.info("%s cannot be reached now (%s): tried again as it is used", self.url, why)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        return _open(*self._given)

    @cached_property
    def _files(self) -> Any:
        return self._opened[0]

    @cached_property
    def _root(self) -> str:
        return self._opened[1].rstrip("/")

    def place(self, cluster: int, tag: str) -> str:
        """Return the URL of a tag."""
        return f"{self.url}/cluster_{cluster}/{tag}"

    def clusters(self) -> set[int]:
        """Return which clusters have a folder there."""
        names = [self._name(path).removeprefix("cluster_") for path in self._list(self._root)]
        return {int(name) for name in names if name.isdecimal()}

    def tags(self, cluster: int) -> dict[str, dict[str, Any]]:
        """Return the manifests of a cluster's complete tags there, as `complete_tags` does."""
        folder = f"{self._root}/cluster_{cluster}"
        listed = sorted({self._name(path) for path in self._list(folder)})
        names = [name for name in listed if self._is_name(name, cluster)]
        wanted = [f"{folder}/{name}/{MANIFEST}" for name in names if not name.endswith(UNFINISHED)]
        if not wanted:
            return {}
        read: Mapping[str, Any] = self._files.cat(wanted, on_error="return")
        found: dict[str, dict[str, Any]] = {}
        for path, content in read.items():
            tag = PurePosixPath(path).parent.name
            if isinstance(content, bytes):
                where = f"{self.place(cluster, tag)}/{MANIFEST}"
                found[tag] = manifest_of_text(content.decode(errors="replace"), where)
            elif not isinstance(content, FileNotFoundError | NotADirectoryError):
                raise content
        return found

    def place_of(self, tag: Path) -> str:
        """Return the URL of a tag of the disk."""
        return f"{self.url}/{self._below_root(tag)}"

    def copy(self, tag: Path, pace: Pace = as_it_comes) -> int:
        """Copy a complete tag of the disk; return how many bytes went over.

        None go where it is there already. `Changed` if the disk's is another by the end.
        """
        there = f"{self._root}/{self._below_root(tag)}"
        own = _read(tag / MANIFEST)
        files = self._files_of(tag)
        manifest = self._with_part(own, files)
        held = self._manifest(there)
        if held is not None and _has_same_files(held, manifest):
            self._files.pipe_file(f"{there}/{MANIFEST}", manifest)  # may say more than it did
            return 0
        if held is not None:
            self._set_aside(there)
        self._remove(there)
        done = 0
        for name, path in files.items():
            done += self._put(path, f"{there}/{name}", pace)
        if _read(tag / MANIFEST) != own or self._with_part(own, self._files_of(tag)) != manifest:
            raise Changed(f"{tag} was written again, or marked, meanwhile")
        self._files.pipe_file(f"{there}/{MANIFEST}", manifest)
        return done + len(manifest)

    def renew(self, tag: Path) -> bool:
        """Write a tag's manifest again, which has changed; return whether it is there."""
        there = f"{self._root}/{self._below_root(tag)}"
        manifest, held = _read(tag / MANIFEST), self._manifest(there)
        if held is not None and (sizes := sizes_of_part(held)):
            manifest = with_part(manifest, sizes)  # which the disk need not have any more
        if held is None or not _has_same_files(held, manifest):
            return False
        self._files.pipe_file(f"{there}/{MANIFEST}", manifest)
        return True

    def remove(self, cluster: int, tag: str) -> None:
        """Delete a tag; ended meanwhile, it leaves nothing that looks complete."""
        self._remove(f"{self._root}/cluster_{cluster}/{tag}")

    def manifest(self, cluster: int, tag: str) -> bytes:
        """Return the content of a tag's manifest; FileNotFoundError if it is not complete."""
        held = self._manifest(f"{self._root}/cluster_{cluster}/{tag}")
        if held is None:
            raise FileNotFoundError(f"{self.place(cluster, tag)} is not complete")
        return held

    def fetch(
        self, cluster: int, tag: str, names: Sequence[str], directory: Path, pace: Pace
    ) -> None:
        """Copy some files of a tag into a directory, whatever they hold.

        `pace` is asked before each file, too, of no bytes.
        """
        for name in names:
            pace(0)
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            path = f"{self._root}/cluster_{cluster}/{tag}/{name}"
            with self._files.open(path, "rb") as source, target.open("wb") as file:
                while chunk := source.read(CHUNK_BYTES):
                    pace(len(chunk))
                    file.write(chunk)

    def is_complete_here(self, tag: Path) -> bool:
        """Whether the disk has the engine's own part of a tag, too; from any thread."""
        return self.part is None or self.part.is_complete(tag.name)

    def num_bytes(self, tag: Path) -> int:
        """Return how many bytes a copy of a tag of the disk takes."""
        return sum(path.stat().st_size for path in (tag / MANIFEST, *self._files_of(tag).values()))

    def _files_of(self, tag: Path) -> dict[str, Path]:
        """Return what is copied of a tag of the disk, by name, but for its manifest."""
        paths = [path for path in files_in(tag) if path != tag / MANIFEST]
        own = {} if self.part is None else files_of_part(self.part, tag.name)
        return {path.relative_to(tag).as_posix(): path for path in paths} | own

    def _with_part(self, manifest: bytes, files: Mapping[str, Path]) -> bytes:
        """Return the manifest of a copy, which names the engine's own part, too."""
        if self.part is None:
            return manifest
        own = {n: p.stat().st_size for n, p in files.items() if n.startswith(f"{FOLDER}/")}
        return with_part(manifest, own)

    def _below_root(self, tag: Path) -> str:
        _, cluster, name = self.lies(tag)
        return f"{cluster}/{name}"

    def _put(self, path: Path, there: str, pace: Pace) -> int:
        size = 0
        with suppress(NotImplementedError):
            self._files.makedirs(there.rpartition("/")[0], exist_ok=True)
        try:
            source = path.open("rb")
        except FileNotFoundError as error:
            raise Changed(f"{path} was deleted meanwhile") from error
        with source, self._files.open(there, "wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                pace(len(chunk))
                target.write(chunk)
                size += len(chunk)
        if self._files.size(there) != size:
            raise OSError(f"{there} holds {self._files.size(there)} bytes of {size} that were sent")
        return size

    def _set_aside(self, there: str) -> None:
        """Copy a complete tag to `.replaced`, which is complete before this one is no more."""
        aside = f"{there}{REPLACED}"
        self._remove(aside)
        for path in self._files.find(there):
            name = self._below(path, there)
            if name != MANIFEST:
                target = f"{aside}/{name}"
                with suppress(NotImplementedError):
                    self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._files.cp_file(path, target)
        self._files.pipe_file(f"{aside}/{MANIFEST}", self._files.cat_file(f"{there}/{MANIFEST}"))

    def _remove(self, there: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{there}/{MANIFEST}")
        with suppress(FileNotFoundError):
            self._files.rm(there, recursive=True)

    def _manifest(self, there: str) -> bytes | None:
        try:
            content: bytes = self._files.cat_file(f"{there}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        return content

    def _list(self, folder: str) -> list[str]:
        self._files.invalidate_cache()  # others write there
        try:
            found: list[str] = self._files.ls(folder, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return found

    def _is_name(self, name: str, cluster: int) -> bool:
        """Whether a name can be a checkpoint's; says once which cannot."""
        where = self.place(cluster, name)
        if not is_tag_name(name) and where not in self._told:
            self._told.add(where)
            logger.warning("%r is passed over: that is no checkpoint's name", where)
        return is_tag_name(name)

    @staticmethod
    def _name(path: str) -> str:
        return PurePosixPath(path).name

    @staticmethod
    def _below(path: str, folder: str) -> str:
        return path.strip("/").removeprefix(folder.strip("/")).strip("/")


def open_remote(config: CheckpointsConfig) -> Remote | None:
    """Return the remote place of a run, if it has one; ConfigError says what is missing for it."""
    if config.remote is None:
        return None
    try:
        return Remote(config.remote, REMOTE)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def is_tag_name(name: str) -> bool:
    """Whether a folder of this name lies in its cluster's directory, and nowhere else."""
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & {*name}


def files_in(tag: Path) -> list[Path]:
    """Return the files of a tag's directory, its manifest the last."""
    return sorted(files_below(tag), key=lambda path: (path == tag / MANIFEST, str(path)))


def names_in(manifest: bytes, where: str) -> dict[str, int | None]:
    """Return the files that a manifest names, with sizes as far as it has them.

    ValueError where it cannot be trusted, names what does not lie in the tag's directory, or
    nothing at all.
    """
    told = manifest_of_text(manifest.decode(errors="replace"), where)
    if DAMAGED in told:
        raise ValueError(told[DAMAGED])
    files, sizes = files_of(json.loads(manifest))
    names: dict[str, int | None] = {**dict.fromkeys(files), **sizes}
    if not names:
        raise ValueError(
            f"{where} does not say which files it has, as dsx 0.2 saved it: copy its folder by "
            "hand to where the run loads from, or load a later one"
        )
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise ValueError(f"{where} names {name!r}, which is no file of a checkpoint's folder")
    return names


def _open(url: str, setting: str) -> tuple[Any, str]:
    check_url(url, setting)
    try:
        import fsspec.core
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{setting} {url} needs fsspec: pip install 'dsx-train[remote]' ({error})"
        ) from None
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, TypeError) as error:  # TypeError: the URL lacks a part
        raise ValueError(f"{setting} {url}: {error}") from None
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise Changed(f"{path.parent} was deleted meanwhile") from error


def _has_same_files(one: bytes, other: bytes) -> bool:
    """Whether two manifests are of the same save, whatever else they say of it."""
    try:
        ours, theirs = json.loads(one), json.loads(other)
        files = files_of(ours)
        is_same = any(files) and files == files_of(theirs) and has_same_content(ours, theirs)
    except (ValueError, AttributeError, TypeError):
        return False
    return one == other or is_same
