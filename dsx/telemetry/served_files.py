"""What a cluster's first rank hands out of its run's folder to members who watch (`dsx watch`).

    {"verb": "records"}                    -> {"cluster": 0, "members": [...], "files": {NAME: ...}}
    {"verb": "records", "file": NAME, "offset": N, "most": M, "before": CRC}
                                           -> {"offset": N, "size": S, "stamp": ..., "data": ...}

Only the files that the page reads, of this cluster, by their names, and nothing can be changed.
`before` is the checksum of what the asker has just before its offset (`checksum`): where the file
has something else there, as after a way back to a checkpoint, or is shorter, the answer begins at 0
and says "is_anew". Data are zlib's, in base64.

All askers together get so many bytes a second as `bytes_per_second` says, and no disk is read
beyond that: the answer is then {"wait_seconds": ...}. Never called by a training thread.
"""

from __future__ import annotations

import base64
import math
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dsx.telemetry.run_folder import cluster_file

MOST_BYTES = 1 << 18  # of a file, in one answer
_MOST_PACKED_BYTES = 45 << 10  # of them once packed: in base64 one part of a message, or a second
_BYTES_PER_SECOND = float(128 << 10)  # of answers, where the line has no limit
_LEAST_BYTES_PER_SECOND = float(4 << 10)
_SHARE_OF_THE_LINE = 0.02  # where it has one
_BURST_SECONDS = 2.0
_REQUEST_BYTES = 512  # that an answer counts for beside its data
_BEFORE_BYTES = 1024
_AT_ONCE = 2  # that read a disk, which may hang
_MOST_OFFSET = 1 << 62
_WAIT_SECONDS = 0.25


def served_names(cluster: int) -> tuple[str, ...]:
    """Return the names of a cluster's files that are handed out: all that the page reads."""
    kinds = (("run", ".json"), ("metrics", ".jsonl"), ("log", ".txt"))
    names = tuple(cluster_file(Path(), stem, suffix, cluster).name for stem, suffix in kinds)
    return (*names, "summary.json") if cluster == 0 else names


def checksum(descriptor: int, offset: int) -> int:
    """Return that of what a file has just before an offset."""
    first = max(offset - _BEFORE_BYTES, 0)
    return zlib.crc32(os.pread(descriptor, offset - first, first))


def unpack(data: str) -> bytes:
    """Return what an answer has, no more than one may; ValueError for anything else."""
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(base64.b64decode(data, validate=True), MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"data that are not zlib's: {error}") from error
    if not unpacking.eof:
        raise ValueError(f"data that are cut off, or of more than {MOST_BYTES} bytes")
    return found


class ByteBudget:
    """Bytes that may be sent now, of so many a second; any thread."""

    def __init__(
        self, line: Callable[[], float | None], now: Callable[[], float] = time.monotonic
    ) -> None:
        """`line` returns what the cluster may send a second, None for no limit."""
        self._line, self._now = line, now
        self._lock = threading.Lock()
        self._at, self._left = now(), self.bytes_per_second * _BURST_SECONDS

    @property
    def bytes_per_second(self) -> float:
        """What all askers get together: little beside the line, and never nothing."""
        line = self._line()
        if line is None:
            return _BYTES_PER_SECOND
        return min(max(line * _SHARE_OF_THE_LINE, _LEAST_BYTES_PER_SECOND), _BYTES_PER_SECOND)

    def wait_seconds(self) -> float:
        """Return in how many seconds something may be sent, 0 for now."""
        with self._lock:
            rate, now = self.bytes_per_second, self._now()
            self._left = min(self._left + rate * (now - self._at), rate * _BURST_SECONDS)
            self._at = now
            return max(-self._left / rate, 0.0)

    def take(self, num_bytes: int) -> None:
        """Count what is sent."""
        with self._lock:
            self._left -= num_bytes


class ServedFiles:
    """One cluster's; `answer` takes a request, in any thread but training's.

    `folder` returns the run's folder, None for a run that keeps no records; `members` are the names
    and addresses of all clusters, for those who are to be asked, too.
    """

    def __init__(
        self,
        cluster: int,
        folder: Callable[[], Path | None],
        members: Sequence[tuple[str, str | None]],
        budget: ByteBudget,
    ) -> None:
        self._cluster, self._folder, self._budget = cluster, folder, budget
        self._members = [list(member) for member in members]
        self._names = served_names(cluster)
        self._places = threading.Semaphore(_AT_ONCE)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer, or ValueError, which says what is allowed."""
        asked = self._asked(request)
        if wait := self._budget.wait_seconds():
            return {"wait_seconds": math.ceil(1000 * wait) / 1000}
        folder = self._folder()
        if folder is None:
            raise ValueError(
                "this run keeps no records, so there is nothing to watch: metrics.dir is not set; "
                'set it, for example "metrics": {"dir": "runs/first"}'
            )
        if not self._places.acquire(blocking=False):
            return {"wait_seconds": _WAIT_SECONDS}
        try:
            found = self._list(folder) if asked is None else self._piece(folder, *asked)
        except OSError as error:
            name = "its folder" if asked is None else asked[0]
            raise ValueError(f"{name} cannot be read there: {error.strerror}") from error
        finally:
            self._places.release()
        self._budget.take(len(found.get("data", "")) + _REQUEST_BYTES)
        return found

    def _asked(self, request: Mapping[str, Any]) -> tuple[str, int, int, int | None] | None:
        """Return the file, the offset, the most bytes and the checksum; None for a list."""
        name: Any = request.get("file")
        if name is None:
            return None
        if name not in self._names:
            raise ValueError(
                f"file={str(name)[:80]!r} is not handed out; these are: {', '.join(self._names)}"
            )
        offset, most = request.get("offset", 0), request.get("most", MOST_BYTES)
        before = request.get("before")
        for field, value, least, limit in (
            ("offset", offset, 0, _MOST_OFFSET), ("most", most, 1, MOST_BYTES),
            ("before", 0 if before is None else before, 0, (1 << 32) - 1),
        ):  # fmt: skip
            if type(value) is not int or not least <= value <= limit:
                raise ValueError(f"{field}={value!r:.40} must be from {least} to {limit}")
        return name, offset, most, before

    def _list(self, folder: Path) -> dict[str, Any]:
        files: dict[str, Any] = {}
        for name in self._names:
            try:
                about = os.lstat(folder / name)
            except FileNotFoundError:  # not yet
                continue
            if stat.S_ISREG(about.st_mode):
                files[name] = {"size": about.st_size, "stamp": _stamp(about)}
        return {"cluster": self._cluster, "members": self._members, "files": files}

    def _piece(
        self, folder: Path, name: str, offset: int, most: int, before: int | None
    ) -> dict[str, Any]:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(folder / name, flags)
        except FileNotFoundError:
            return {"is_missing": True}
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise ValueError(f"{name} is no plain file there")
            is_anew = offset > about.st_size
            if before is not None and not is_anew:
                is_anew = checksum(descriptor, offset) != before
            start = 0 if is_anew else offset
            data = os.pread(descriptor, most, start)
        finally:
            os.close(descriptor)
        packed, limit = (
            zlib.compress(data, 1),
            min(_MOST_PACKED_BYTES, self._budget.bytes_per_second),
        )
        while len(packed) > limit:
            data = data[: len(data) // 2]
            packed = zlib.compress(data, 1)
        return {
            "offset": start, "size": about.st_size, "stamp": _stamp(about), "is_anew": is_anew,
            "data": base64.b64encode(packed).decode(),
        }  # fmt: skip


class Listing:
    """A cluster's answer to which files there are, read with suspicion; ValueError for another."""

    def __init__(self, told: Mapping[str, Any], cluster: int) -> None:
        if told.get("cluster") != cluster:
            raise ValueError("an answer of another cluster than was asked")
        self.members: list[tuple[str, str | None]] = []
        for member in _list_of(told.get("members")):
            name, address = member if isinstance(member, list) and len(member) == 2 else (0, 0)  # type: ignore[misc]
            if not isinstance(name, str) or not isinstance(address, str | None):
                raise ValueError("an answer whose members cannot be read")
            self.members.append((name, address))
        files: Any = told.get("files")
        self.sizes: dict[str, tuple[int, str]] = {}  # with their stamps
        for name in served_names(cluster):
            file: Any = files.get(name) if isinstance(files, dict) else None  # type: ignore[misc]
            if file is None:
                continue
            if not isinstance(file, dict):
                raise ValueError(f"an answer whose {name} cannot be read")
            file = cast("dict[str, Any]", file)
            size, stamp = file.get("size"), file.get("stamp")
            if type(size) is not int or not 0 <= size <= _MOST_OFFSET or not isinstance(stamp, str):
                raise ValueError(f"an answer whose {name} cannot be read")
            self.sizes[name] = size, stamp


def _list_of(found: Any) -> list[Any]:
    return cast("list[Any]", found) if isinstance(found, list) else []


def _stamp(about: os.stat_result) -> str:
    return f"{about.st_ino}-{about.st_mtime_ns}-{about.st_size}"
