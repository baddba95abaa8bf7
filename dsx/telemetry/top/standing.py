"""How a run stands, from the end of its files: by cluster, over the last minute of each."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.telemetry.following import LONGEST_LINE, FollowedFile, Fresh, objects_in
from dsx.telemetry.run_folder import cluster_file, files_of, read_about, say_end
from dsx.telemetry.sound import sound_about, sound_record

WINDOW_SECONDS = 60.0
_SILENT_SECONDS = 15.0  # without a record, at least, and several steps' worth
_MOST_RECORDS = 5000
_MOST_BYTES = 512 * 1024  # of a file's end that are looked at first, and of what has come since
_MOST_EVENTS = 200
_MOST_LETTERS = 60  # of how it has ended
_LEFT_OUT = ("refused_by", "differed_in", "uncommitted_by")


@dataclass(frozen=True)
class Standing:
    """One cluster now; None where its files do not say. Rates are of the last minute."""

    cluster: int
    state: str
    step: int | None
    loss: float | None
    steps_per_second: float | None
    tokens_per_second: float | None
    utilization: float | None
    bytes_per_second: float | None
    hidden: float | None  # share of the transfers' time that was not waited for
    left_out: int  # rounds, of those that are looked at
    saved_step: int | None
    age_seconds: float | None  # of its last record
    process_bytes: float | None = None
    round_trip_seconds: float | None = None  # to the farthest of the other clusters
    measured_bytes_per_second: float | None = None  # what its line gave in `dsx net-test`


class ClusterFiles:
    """Follows one cluster's records."""

    def __init__(self, folder: Path, cluster: int) -> None:
        self.cluster = cluster
        path = cluster_file(folder, "metrics", ".jsonl", cluster)
        self.file = FollowedFile(path, _MOST_BYTES, keeps_up=True)
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=_MOST_RECORDS)
        self._syncs: deque[Mapping[str, Any]] = deque(maxlen=_MOST_RECORDS)
        self._loss: float | None = None
        self._machine: Mapping[str, Any] = {}

    def look(self, about: Mapping[str, Any], now: float) -> Standing:
        """Read what is new; `about` is what run.json says, empty if there is none."""
        fresh = _read(self.file)
        if fresh.is_anew:  # a resumed run has the records before that again
            self._steps.clear()
            self._syncs.clear()
            self._loss = None
        for told in objects_in(fresh.lines):
            record = sound_record(told)
            if record is None:
                continue
            kind = record["kind"]
            if kind == "step":
                self._steps.append(record)
                self._loss = record.get("loss", self._loss)
            elif kind == "sync":
                self._syncs.append(record)
            elif kind == "machine":
                self._machine = record
        last = self._steps[-1] if self._steps else {}
        end = last.get("time")
        steps = [r for r in self._steps if end is not None and r["time"] > end - WINDOW_SECONDS]
        syncs = [r for r in self._syncs if end is not None and r["time"] > end - WINDOW_SECONDS]
        seconds = sum(r.get("seconds") or 0.0 for r in steps)
        tokens = [r["tokens"] for r in steps if "tokens" in r]
        age = None if end is None else max(now - end, 0.0)
        pace = seconds / len(steps) if steps else 0.0
        trips = [link.get("round_trip_seconds") or 0.0 for link in self._machine.get("links", ())]
        return Standing(
            self.cluster,
            _state(about, age, pace),
            last.get("step"),
            self._loss,
            _per(len(steps), seconds),
            _per(sum(tokens), seconds) if tokens else None,
            _utilization(steps, seconds),
            _sent_per_second(steps, syncs, seconds),
            _hidden(syncs),
            sum(any(r.get(key) for key in _LEFT_OUT) for r in self._syncs),
            max((c["step"] for c in about.get("checkpoints", ())), default=None),
            age,
            self._machine.get("process_bytes"),
            max(trips, default=None),
            self._machine.get("measured_bytes_per_second"),
        )


class RunFiles:
    """Follows a run's folder; clusters that come later are found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clusters: dict[int, ClusterFiles] = {}
        self._logs: dict[int, FollowedFile] = {}
        self._named: set[Path] = set()  # files with lines that are too long
        self._events: deque[str] = deque(maxlen=_MOST_EVENTS)

    def look(self) -> list[Standing]:
        """Return how each cluster stands now."""
        now = time.time()
        told = read_about(self.folder)
        abouts = {m: found for m, about in told.items() if (found := sound_about(about))}
        for cluster in files_of(self.folder, "metrics"):
            abouts.setdefault(cluster, {})
        for cluster in sorted(abouts):
            if cluster not in self._clusters:
                self._clusters[cluster] = ClusterFiles(self.folder, cluster)
                log = cluster_file(self.folder, "log", ".txt", cluster)
                self._logs[cluster] = FollowedFile(log, _MOST_BYTES, keeps_up=True)
        return [one.look(abouts.get(m, {}), now) for m, one in sorted(self._clusters.items())]

    def events(self, most: int) -> list[str]:
        """Return the last warnings of the clusters' logs, in the order of their times."""
        fresh: list[str] = []
        for cluster, log in self._logs.items():
            for line in _read(log).lines:
                words = line.decode(errors="replace").split(" ", 2)
                if len(words) == 3 and words[1] in ("WARNING", "ERROR"):
                    text = words[2].partition(": ")[2] or words[2]
                    fresh.append(f"{words[0]} cluster {cluster}: {text}")
            for file in (self._clusters[cluster].file, log):
                if file.num_too_long and file.path not in self._named:
                    self._named.add(file.path)
                    what = f"a line of {file.path.name} is longer than {LONGEST_LINE}, and left out"
                    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    fresh.append(f"{when} cluster {cluster}: {what}, as more like it are")
        self._events.extend(sorted(fresh))
        return [*self._events][-most:]


def _read(file: FollowedFile) -> Fresh:
    with contextlib.suppress(OSError):  # looked at again the next time
        return file.read()
    return Fresh()


def _state(about: Mapping[str, Any], age: float | None, pace: float) -> str:
    starts = about.get("starts")
    told = say_end(starts[-1]) if starts else ""
    if starts and (starts[-1].get("end") or told == "killed"):
        return told if len(told) <= _MOST_LETTERS else f"{told[:_MOST_LETTERS]}..."
    if age is None:
        return "starting" if starts else "no step yet"
    if age > max(_SILENT_SECONDS, 5 * pace):
        return "silent"
    return "training"


def _per(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def _utilization(steps: list[Mapping[str, Any]], seconds: float) -> float | None:
    blocked = [r["blocked_seconds"] for r in steps if "blocked_seconds" in r]
    return 1 - sum(blocked) / seconds if blocked and seconds else None


def _sent_per_second(
    steps: list[Mapping[str, Any]], syncs: list[Mapping[str, Any]], seconds: float
) -> float | None:
    """Return a window's rate: by the counter's difference, or else by its transfers' bytes."""
    places = [at for at, record in enumerate(steps) if "bytes_sent" in record]
    if places:
        first, last = places[0], places[-1]
        sent = steps[last]["bytes_sent"] - steps[first]["bytes_sent"]
        if last > first and sent >= 0:  # sent in the steps behind the first
            return _per(sent, sum(r.get("seconds") or 0.0 for r in steps[first + 1 : last + 1]))
    return _per(sum(r.get("bytes_sent") or 0 for r in syncs), seconds)


def _hidden(syncs: list[Mapping[str, Any]]) -> float | None:
    taken = sum(r.get("transfer_seconds") or 0.0 for r in syncs)
    waited = sum(r.get("wait_seconds") or 0.0 for r in syncs)
    return max(1 - waited / taken, 0.0) if taken else None
