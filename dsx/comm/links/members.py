"""Who is a member: the folder `members/` as it stands, looked at again while a run goes on.

A file is read again once its inode, size or times are others. What cannot be taken is a problem,
told in words; of a file with one, what was read before stays in force.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from dsx.comm.links.key_files import (
    public_path,
    read_public,
    read_revoked_keys,
    require_kept_from_others,
    revoked_path,
)
from dsx.comm.links.key_lines import PublicKey, Revoked, require_name

_YOUNG_SECONDS = 2.0  # a file may change again within one tick of its times
_V = TypeVar("_V")


@dataclass(frozen=True)
class Standing:
    """The keys that are in force, of each member the older first."""

    keys: dict[str, tuple[PublicKey, ...]] = field(default_factory=dict[str, tuple[PublicKey, ...]])
    by_curve: dict[bytes, str] = field(default_factory=dict[bytes, str])


class WatchedFile(Generic[_V]):
    """A file's content, read again once it is another file; `value` is None before the first."""

    def __init__(self, path: Path, read: Callable[[], _V]) -> None:
        self._path, self._read = path, read
        self._stamp: tuple[int, ...] | None = None
        self.value: _V | None = None
        self.problem = ""

    def look(self) -> bool:
        """Read it if it has changed; return whether it was read. Whatever is wrong is `problem`."""
        stamp = _stamp(self._path)
        if stamp is not None and stamp == self._stamp and not self.problem:
            return False
        self._stamp = stamp
        try:
            self.value, self.problem = self._read(), ""
        except ValueError as error:
            self.problem = str(error)
        return True


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return what differs from one content to another; None where that cannot be told yet."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    except OSError:
        return None
    if time.time() - max(status.st_mtime, status.st_ctime) < _YOUNG_SECONDS:
        return None
    return (
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
        status.st_mode, status.st_uid,
    )  # fmt: skip


class MembersFolder:
    """The public keys of all members, without those that are revoked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, WatchedFile[tuple[PublicKey, ...] | None]] = {}
        path = revoked_path(directory)
        self._revoked = WatchedFile(path, lambda: read_revoked_keys(path) or ())
        self._collisions: list[str] = []
        self.standing = Standing()

    @property
    def revoked(self) -> tuple[Revoked, ...]:
        """What is out for good."""
        return self._revoked.value or ()

    def is_revoked(self, key: PublicKey) -> bool:
        """Whether a key is out, or has a part of one that is."""
        return any(revoked.key.shares_with(key) for revoked in self.revoked)

    def look(self) -> list[str]:
        """Read what has changed, and bring `standing` up to date; return what is wrong, in words.

        Called once a second: where nothing has changed, a `stat` per member.
        """
        try:
            names, problems = self._names()
        except OSError as error:  # a file server that is away takes nobody with it
            folder = self._directory / "members"
            make = "; `dsx keys new NAME` makes it" if isinstance(error, FileNotFoundError) else ""
            return [f"cannot read {folder}: {error.strerror}{make}"]
        is_new = self._revoked.look() or (names is not None and names != list(self._files))
        if names is not None:
            files = {name: self._files.get(name) or self._file(name) for name in names}
            is_new = any([file.look() for file in files.values()]) or is_new
            self._files = files
        problems += [f.problem for f in (self._revoked, *self._files.values()) if f.problem]
        if is_new or self._collisions:
            self._collisions = self._combine()
        return problems + self._collisions

    def _names(self) -> tuple[list[str] | None, list[str]]:
        """Return whose files are there, and what is wrong; None where anybody may have put them."""
        folder = self._directory / "members"
        try:
            require_kept_from_others(folder, folder.stat())
        except ValueError as error:
            return None, [str(error)]
        with os.scandir(folder) as entries:
            found = sorted(e.name for e in entries if e.name.endswith(".public"))
        names: list[str] = []
        problems: list[str] = []
        for file in found:
            try:
                if not file.startswith("."):
                    names.append(require_name(file.removesuffix(".public")))
            except ValueError as error:
                problems.append(f"{folder / file}: {error}")
        return names, problems

    def _file(self, name: str) -> WatchedFile[tuple[PublicKey, ...] | None]:
        path = public_path(self._directory, name)
        return WatchedFile(path, lambda: read_public(path))

    def _combine(self) -> list[str]:
        """Put `standing` together; a key that two names claim stays with who had it before."""
        before = self.standing.keys
        claimed = {name: file.value or () for name, file in self._files.items()}
        order = sorted(claimed, key=lambda n: (not set(claimed[n]) <= set(before.get(n, ())), n))
        problems: list[str] = []
        owner: dict[bytes, str] = {}
        keys: dict[str, tuple[PublicKey, ...]] = {}
        for name in order:
            taken: list[PublicKey] = []
            for key in claimed[name]:
                other = owner.get(key.curve) or owner.get(key.sign)
                if other is not None:
                    problems.append(
                        f"{public_path(self._directory, name)}: the key {key.fingerprint} shares "
                        f"what belongs to {other}; a key has one member: remove one of the lines"
                    )
                    continue
                owner[key.curve] = owner[key.sign] = name
                if not self.is_revoked(key):
                    taken.append(key)
            if taken:
                keys[name] = tuple(taken)
        self.standing = Standing(keys, {k.curve: n for n, own in keys.items() for k in own})
        return problems
