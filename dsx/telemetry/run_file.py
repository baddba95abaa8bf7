"""run.json: one cluster's word on its run, written whole by a thread of its own.

    format, cluster   1; the cluster that writes it
    files             of this cluster: metrics, log, and where asked for trace and tensorboard
    starts            one each time the run was started, the last one is in force:
        session       the name of this start, the same in all clusters
        time, step    when, and the inner steps taken before
        resumed_from, resumed_session      the checkpoint, and the start that wrote it; or null
        rolled_back   from_step and why, where training had diverged and went back
        (facts)       of the program: settings as given and resolved, versions, sizes, host
        end           time, step and how, and how many records which files lack, if any do; null of
                      a run under way, or that was killed
    checkpoints       those saved complete: path, tag, step, time

Paths are relative to the folder where they lie in it. The file is replaced as a whole, so that a
reader never sees half of one. Nothing but a start waits for a disk on the training thread.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dsx.telemetry.behind import Behind, RunLog
from dsx.telemetry.folder_choice import Origin
from dsx.telemetry.leftovers import remove_leftovers
from dsx.telemetry.run_folder import FORMAT, cluster_file, read_own


class RunFile:
    """Keeps one cluster's run.json and log; every method is a no-op without a directory.

    `facts` describe this start. `begin`, once or more, says in which folder and where it starts
    from, and `confirm` that it has taken a step, from which on the folder is this run's.
    """

    def __init__(
        self,
        is_kept: bool,
        cluster: int,
        files: Mapping[str, str],
        facts: Mapping[str, Any],
        behind: Behind | None = None,
    ) -> None:
        self._directory: Path | None = None
        self._cluster = cluster
        self._files = files
        self._facts = facts
        self._document: dict[str, Any] = {}
        self._pending: dict[str, Any] | None = None
        self._behind = behind or Behind()
        self._log = RunLog(self._behind) if is_kept else None

    def begin(
        self, directory: Path | None, step: int, origin: Origin | None, continues: bool
    ) -> None:
        """Start from `step`; `continues`: what the folder holds is of the same run."""
        if self._log is None or directory is None:
            return
        self.flush()
        self._directory = directory
        self._document = (self._read() if continues else None) or self._new()
        self._pending = {
            "step": step,
            "resumed_from": None if origin is None else self._relative(origin.path),
            "resumed_session": None if origin is None else origin.session,
            "end": None,
            **self._facts,
        }

    def confirm(self) -> None:
        """Enter this start: a first step has been taken. Later calls take an end back."""
        if self._pending is None:
            if self._document and self._document["starts"][-1]["end"]:
                self._document["starts"][-1]["end"] = None
                self._write()
            return
        assert self._directory is not None and self._log is not None
        folder, cluster = self._directory, self._cluster
        self._behind.do(lambda: folder.mkdir(parents=True, exist_ok=True), folder, 0)
        self._behind.do(lambda: remove_leftovers(folder, cluster), folder, 0)
        log = cluster_file(self._directory, "log", ".txt", self._cluster)
        self._document["files"] = {**self._files, "log": log.name}
        self._document["starts"].append({"time": _now(), **self._pending})
        self._log.begin(log)
        self._pending = None
        self._write()

    def saved(self, path: Path, step: int) -> None:
        """Add a checkpoint, which is complete; one that was written again counts once."""
        if self._directory is None:
            return
        entry = {"path": self._relative(path), "tag": path.name, "step": step, "time": _now()}
        others = [c for c in self._document["checkpoints"] if c["path"] != entry["path"]]
        self._document["checkpoints"] = [*others, entry]
        if self._pending is None:
            self._write()

    def copied(self, path: Path, url: str) -> None:
        """Say of a checkpoint where a copy is."""
        if self._directory is not None:
            told = self._relative(path)
            for entry in self._document["checkpoints"]:
                if entry["path"] == told or entry["path"].startswith(f"{told}/"):
                    entry["copied_to"] = url
            if self._pending is None:
                self._write()

    def rolled_back(self, why: str, step: int) -> None:
        """Say that the start which has just begun goes back, from a step of the one before."""
        if self._pending is not None:
            self._pending["rolled_back"] = {"from_step": step, "why": why}

    def deleted(self, path: Path) -> None:
        """Take a checkpoint out; any thread may call it."""
        if self._directory is not None:
            gone = self._relative(path)
            kept = [c for c in self._document["checkpoints"] if c["path"] != gone]
            self._document["checkpoints"] = kept
            if self._pending is None:
                self._write()

    def end(self, step: int, how: str) -> None:
        """Say how the run ended, unless that has been said."""
        if self._document and self._pending is None and not self._document["starts"][-1]["end"]:
            end: dict[str, Any] = {"time": _now(), "step": step, "how": how}
            if missing := self._behind.missing.by_file():
                end["missing"] = missing
            self._document["starts"][-1]["end"] = end
            self._write()

    def close(self) -> None:
        """Return once everything is written."""
        self._behind.flush()
        self._behind.missing.tell()
        if self._log is not None:
            self._log.close()
        self._behind.close()

    def flush(self) -> None:
        """Return once what has been said so far is written."""
        if self._directory is not None:
            self._behind.flush()

    def _new(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"files": {}, "starts": [], "checkpoints": []}
        return {"format": FORMAT, "cluster": self._cluster, **empty}

    @property
    def _path(self) -> Path:
        assert self._directory is not None
        return cluster_file(self._directory, "run", ".json", self._cluster)

    def _read(self) -> dict[str, Any] | None:
        assert self._directory is not None
        try:
            return read_own(self._directory, self._cluster)
        except OSError as error:
            self._behind.missing.add(self._path, str(error.strerror), 0)
            return None

    def _write(self) -> None:
        text, path = json.dumps(self._document, indent=1, default=str) + "\n", self._path
        self._behind.do(lambda: replace_file(path, text), path, is_whole=True)

    def _relative(self, path: Path) -> str:
        assert self._directory is not None
        folder, whole = self._directory.absolute(), path.absolute()
        return str(whole.relative_to(folder) if whole.is_relative_to(folder) else whole)


def replace_file(path: Path, text: str) -> None:
    """Write a small file as a whole or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with unfinished.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
