"""One cluster's files of a run, copied here as they grow, from what it hands out (`records`).

Whatever comes is for files of this cluster's names, in one folder, and of bounded pieces: a member
that lies spoils its own records, and nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsx.telemetry.served_files import MOST_BYTES, Listing, checksum, unpack

MARK = ".dsx_mirror"  # in a folder that may be written to, as it was made here
_WHOLE = ("run", "summary")  # how names of files begin that are replaced as a whole
_MOST_WHOLE_BYTES = 64 << 20
_MOST_FILE_BYTES = 8 << 30
_LOG_BYTES = 256 << 10  # of the end of a log, which is all that the page reads
_LEAST_BEFORE = 1024  # bytes of a file that is not had from its beginning, to be compared
_TRIES = 3  # of a file that is replaced while it is read
Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def mirror_folder(folder: Path) -> Path:
    """Return a folder to copy into, made here or empty; ValueError for another."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in folder.iterdir()}
    if names and MARK not in names:
        raise ValueError(
            f"--dir {folder} holds files that no `dsx watch --join` has written ({min(names)}): "
            "give a folder that is new, empty or of an earlier --join"
        )
    if names == {MARK}:
        (folder / MARK).unlink()  # so that it is the folder of a run to come
    return folder


class ClusterMirror:
    """Follows one cluster; for one thread at a time."""

    def __init__(self, folder: Path, cluster: int) -> None:
        self.lock = threading.Lock()  # held by whoever pulls
        self._folder, self._cluster = folder, cluster
        self._stamps: dict[str, str] = {}  # of what is here whole
        self._first: dict[str, int] = {}  # where a file begins of which the end is had alone

    def pull(self, ask: Ask) -> Listing:
        """Copy what is new; `ask` sends a request and returns the answer. ValueError, OSError."""
        listing = Listing(ask({}), self._cluster)
        for name, (size, stamp) in listing.sizes.items():
            if self._stamps.get(name) == stamp:
                continue
            (self._folder / MARK).touch()
            if name.startswith(_WHOLE):
                self._stamps[name] = self._fetch(ask, name)
            else:
                self._stamps[name] = self._follow(ask, name, size)
        return listing

    def _fetch(self, ask: Ask, name: str) -> str:
        """Replace a file; return the stamp of what is here then, empty where it is not whole."""
        found, stamp = b"", ""
        for _ in range(_TRIES):
            found, stamp, size = b"", "", 1
            while len(found) < size <= _MOST_WHOLE_BYTES:
                piece = ask({"file": name, "offset": len(found), "most": MOST_BYTES})
                if piece.get("is_missing"):
                    return ""
                data, size = _data(piece), _size(piece)
                if piece.get("offset") != len(found) or not data:
                    break  # it has become shorter
                if stamp not in ("", str(piece.get("stamp"))):
                    break  # another one by now
                found, stamp = found + data, str(piece.get("stamp"))
            else:
                if size > _MOST_WHOLE_BYTES:
                    raise ValueError(f"{name} has {size} bytes; {_MOST_WHOLE_BYTES} are copied")
                _replace(self._folder / name, found)
                return stamp
        return ""

    def _follow(self, ask: Ask, name: str, size: int) -> str:
        """Append what a file has more by now, or begin it anew; return its stamp by then."""
        path = self._folder / name
        if name not in self._first:
            is_log = name.startswith("log")
            self._first[name] = max(size - _LOG_BYTES, 0) if is_log else 0
            if is_log or not path.exists():
                _replace(path, b"")
        while True:
            with path.open("rb+") as file:
                have = file.seek(0, os.SEEK_END)
                offset = self._first[name] + have
                asked: dict[str, Any] = {"file": name, "offset": offset, "most": MOST_BYTES}
                if self._first[name] == 0 or have >= _LEAST_BEFORE:
                    asked["before"] = checksum(file.fileno(), have)
                piece = ask(asked)
                if piece.get("is_missing"):
                    return ""
                data, is_anew = _data(piece), piece.get("is_anew") is True
                if piece.get("offset") != (0 if is_anew else offset):
                    raise ValueError(f"an answer of another place of {name} than was asked")
                if not is_anew:
                    file.write(data)
            if is_anew and name.startswith("log"):
                self._first[name] = max(_size(piece) - _LOG_BYTES, 0)
                _replace(path, b"")
                continue
            if is_anew:
                self._first[name] = 0
                _replace(path, data)
                have, offset = 0, 0
            if have + len(data) > _MOST_FILE_BYTES:
                raise ValueError(f"{name} has over {_MOST_FILE_BYTES} bytes, which are copied")
            listed = min(size, _size(piece))  # what has come since is for the next time
            if offset + len(data) >= listed or not data:
                return str(piece.get("stamp"))


def _data(piece: Mapping[str, Any]) -> bytes:
    data = piece.get("data")
    if not isinstance(data, str):
        raise ValueError("an answer without data")
    return unpack(data)


def _size(piece: Mapping[str, Any]) -> int:
    size = piece.get("size")
    if type(size) is not int:
        raise ValueError("an answer without a size")
    return size


def _replace(path: Path, data: bytes) -> None:
    """Put another file in a place: whoever reads there sees that it is another."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_bytes(data)
    unfinished.replace(path)
