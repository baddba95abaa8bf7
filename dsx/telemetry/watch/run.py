"""A run's folder, followed while clusters write to it.

One thread calls `poll`; any other may read under `lock`. The run, a cluster's files, and a line's
end may come later. Of a long file, places all over it are looked at first, so that a chart is there
at once; the records of that look are in force until the whole file is read.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from dsx.telemetry.following import LONGEST_LINE, FollowedFile, Fresh, first_look
from dsx.telemetry.run_folder import (
    Record,
    cluster_file,
    files_of,
    find_run,
    is_run,
    of_other_runs,
    open_summary,
    read_about,
)
from dsx.telemetry.sound import seconds_of, sound_about
from dsx.telemetry.watch.cluster import MOST_ROWS, WatchedCluster
from dsx.telemetry.watch.processes import Processes
from dsx.telemetry.watch.replay import Replay, Replays

_LOG_BYTES = 256 << 10  # of the end of a log
_LOG_LINE = re.compile(r"(\S+) (WARNING|ERROR|CRITICAL) (\S+?): (.*)")
_MOST_TEXT = 600  # characters of an event
_MOST_EVENTS = 300
_BESIDE_SECONDS = 5.0  # between two looks at the folders beside
_FULL_CLUSTERS = 4  # of more, each has fewer rows


@dataclass(frozen=True)
class LogLine:
    """What a cluster has warned of; `when` in seconds since 1970."""

    when: float
    cluster: int
    level: str
    text: str


class _Part:
    """One cluster's files."""

    def __init__(self, folder: Path, cluster: int, path: Path, most_rows: int) -> None:
        self.read = WatchedCluster(cluster, most_rows)
        self.looked: WatchedCluster | None = None
        self.file = FollowedFile(path)
        self.log = FollowedFile(cluster_file(folder, "log", ".txt", cluster), _LOG_BYTES)
        self._most_rows = most_rows
        self._replay: Replay | None = None

    def follow(self, replay: Replay) -> None:
        """Have all records taken there, too."""
        self._replay, self.read.heard = replay, replay.take

    def has_ended(self, about: Record | None) -> None:
        """Take that there is no more of its file for now, and what run.json says."""
        if self._replay is not None:
            self._replay.is_whole = True
            if about is not None:
                self._replay.tell(about)

    def begin(self) -> None:
        """Look at the file, which is then read anew."""
        self.read.begin()
        if self._replay is not None:
            self._replay.anew()
        self.looked = None
        lines = first_look(self.file.path)
        if lines:
            self.looked = WatchedCluster(self.read.cluster, self._most_rows)
            self.looked.counts_tokens = False
            for line in lines:
                self.looked.take(line)


class WatchedRun:
    """The run that a path means. FileNotFoundError where it is something else.

    A path where nothing is yet is the folder of a run that is to come.
    """

    def __init__(self, path: Path) -> None:
        is_to_come = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        self.folder = path if is_to_come else find_run(path)
        self.lock = RLock()
        self.version = 0
        self._troubles: dict[str, str] = {}  # by what could not be read
        self.other_runs: list[int] = []
        self.log_lines: deque[LogLine] = deque(maxlen=_MOST_EVENTS)
        self.abouts: dict[int, Record] = {}
        self.summary: Record = {}
        self.newer: Path | None = None
        self.replays: Replays | None = None  # of its records, where a page shows their figures
        self.beside_seconds = _BESIDE_SECONDS
        self._beside_at = 0.0
        self.processes = Processes()
        self._parts: dict[int, _Part] = {}
        self._seen: dict[Path, tuple[int, int]] = {}

    @property
    def trouble(self) -> str:
        """What cannot be read just now, and why; empty where all can."""
        return "; ".join(dict.fromkeys(filter(None, self._troubles.values())))

    @property
    def clusters(self) -> list[WatchedCluster]:
        """What is known of each cluster that has written, in order."""
        parts = [part for m, part in sorted(self._parts.items()) if m not in self.other_runs]
        return [part.looked or part.read for part in parts]

    @property
    def read_share(self) -> float:
        """How much of the files has been read, from 0 to 1."""
        files = [part.file for part in self._parts.values()]
        size = sum(file.size_bytes for file in files)
        return sum(file.read_bytes for file in files) / size if size else 1.0

    def poll(self, seconds: float = 0.5) -> bool:
        """Read what is new, for about so long; return whether there is more.

        A folder that cannot be read is told of on the page, and looked at again.
        """
        until, has_more = time.monotonic() + seconds, False
        with self._telling("the folder"), self.lock:
            if not is_run(self.folder):
                return False
            self._look_at_files()
        while True:
            has_more = False
            for part in list(self._parts.values()):
                has_more = self._read(part) or has_more
                time.sleep(0)  # whoever waits for the lock is next
            if not has_more or time.monotonic() > until:
                break
        with self.lock:
            words = {cluster.cluster: cluster.last_time for cluster in self.clusters}
            if self.processes.look(self.abouts, words):
                self.version += 1
            if not has_more:
                for cluster, part in self._parts.items():
                    part.has_ended(self.abouts.get(cluster))
        return has_more

    def tell(self, what: str, why: str) -> None:
        """Say on the page what cannot be read, and why; empty: it can again."""
        with self.lock:
            if self._troubles.get(what, "") != why:
                self._troubles[what] = why
                self.version += 1

    @contextlib.contextmanager
    def _telling(self, what: str) -> Generator[None]:
        """Tell of an error in reading, which ends nothing else; of none where it goes well."""
        why = ""
        try:
            yield
        except OSError as error:
            why = str(error)
        finally:
            self.tell(what, why)

    def _look_at_files(self) -> None:
        """Take clusters that are new, and what changed in run.json."""
        files = files_of(self.folder, "metrics")
        most_rows = MOST_ROWS
        while most_rows * len(files) > MOST_ROWS * _FULL_CLUSTERS:
            most_rows //= 2
        for cluster, path in files.items():
            if cluster not in self._parts:
                self._parts[cluster] = part = _Part(self.folder, cluster, path, most_rows)
                if self.replays is not None and (replay := self.replays.of(cluster)) is not None:
                    part.follow(replay)
                self.version += 1
        self._look_beside()
        told = [*files_of(self.folder, "run").values(), self.folder / "summary.json"]
        seen = {path: _stamp(path) for path in told}
        if seen == self._seen:
            return
        try:
            abouts = dict(read_about(self.folder))
            self.summary = open_summary(self.folder)
        except ValueError as error:  # told on the page; what was known stays
            self.tell("run.json", str(error))
        else:
            sound = {m: found for m, about in abouts.items() if (found := sound_about(about))}
            odd = [str(m) for m in abouts if sound.get(m) != abouts[m]]
            who = f"what run.json says of cluster {', '.join(odd)} is in part not of dsx"
            self.tell("run.json", f"{who}, and left out" if odd else "")
            self.abouts = sound
            self.other_runs = of_other_runs(self.abouts)
        self._seen = seen
        self.version += 1

    def _look_beside(self) -> None:
        """Look now and then whether a later run has begun, which is in a folder of its own."""
        if time.monotonic() < self._beside_at:
            return
        self._beside_at = time.monotonic() + self.beside_seconds
        newer = None
        with contextlib.suppress(OSError):  # the folder above may not be readable
            newer = newer_run(self.folder)
        if newer != self.newer:
            self.newer = newer
            self.version += 1

    def _read(self, part: _Part) -> bool:
        """Take a chunk of a cluster's files; return whether there was one."""
        fresh = log = Fresh()
        with self._telling(str(part.file.path)):
            fresh = part.file.read()
            if not fresh.lines:
                part.looked = None
        if fresh.lines or fresh.is_anew:  # before the log, which may not be readable
            with self.lock:
                if fresh.is_anew:
                    part.begin()
                for line in fresh.lines:
                    part.read.take(line)
                self.version += 1
        with self._telling(str(part.log.path)):
            log = part.log.read()
        for file in (part.file, part.log):
            if file.num_too_long:
                how = f"{file.num_too_long} of its lines longer than {LONGEST_LINE}, left out"
                self.tell(f"lines of {file.path}", f"{file.path.name}: {how}")
        if log.lines:
            with self.lock:
                for line in log.lines:
                    self._take_log(part.read.cluster, line)
                self.version += 1
        return bool(fresh.lines or log.lines)

    def _take_log(self, cluster: int, line: bytes) -> None:
        match = _LOG_LINE.fullmatch(line.decode(errors="replace"))
        if match is None:
            return
        try:
            when = seconds_of(match[1])
        except (ValueError, OverflowError):
            return
        self.log_lines.append(LogLine(when, cluster, match[2].lower(), match[4][:_MOST_TEXT]))


def newer_run(folder: Path) -> Path | None:
    """Return the folder of a later run of the same name: a start takes the next free one."""
    own = folder.resolve()
    pattern = re.compile(rf"{re.escape(own.name)}-[1-9]\d*")
    begun = _begun(own)
    later = [path for path in own.parent.iterdir() if pattern.fullmatch(path.name)]
    found = [(_begun(path), path) for path in later]
    return max((one for one in found if one[0] > begun), default=(0, None))[1]


def _begun(folder: Path) -> int:
    """Return when a run's clusters last said something of a start or an end; 0 for no run."""
    if not folder.is_dir():
        return 0
    return max((_stamp(path)[0] for path in files_of(folder, "run").values()), default=0)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except FileNotFoundError:  # replaced just now
        return 0, 0
    return about.st_mtime_ns, about.st_ino
