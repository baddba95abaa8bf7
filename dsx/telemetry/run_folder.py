"""A run's folder, which `metrics.dir` names, and the one way to open it.

    run.json, run.cluster_1.json, ...          what ran: settings, versions, starts, checkpoints
    metrics.jsonl, metrics.cluster_1.jsonl     a record per inner step and per sync
    log.txt, log.cluster_1.txt, ...            what dsx logged
    trace.cluster_0.rank_0.part_1.jsonl.gz     spans of a rank, with `metrics.trace`
    stacks.cluster_0.rank_0.txt, ...           what a rank that stalled was doing (stalls.py)
    tensorboard/cluster_0, ...                 with `metrics.to`; so do `wandb` and `mlflow`
    summary.json                               the script's own results, where it writes any
    plot.png, trace.json                       what `dsx report` and `dsx trace` make

A cluster writes files of its own name alone. So nothing is locked where clusters share a file
system, and where they do not, the folders of all sites can be copied into one. A path to the
folder, to any file in it, or to a checkpoint below it means the run. Runs of dsx 0.1, which have
no run.json, are read, too, and so is what a killed run leaves.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

FORMAT = 1  # of run.json, see run_file.py
Record = Mapping[str, Any]
logger = logging.getLogger(__name__)
RUN_HELP = "A run's folder (metrics.dir), a file in it, or a checkpoint below it."
_FILES = re.compile(
    r"(?P<kind>run|metrics)(\.cluster_(?P<cluster>\d+))?\.jsonl?|"
    r"trace\.cluster_\d+\.rank_\d+(?:\.jsonl|\.part_\d+\.jsonl\.gz)"
)
_MOST_LEVELS = 4  # from a file of a checkpoint: tag, cluster, checkpoints, run
_MOST_NAMES = 8


@dataclass(frozen=True)
class ClusterRun:
    """One cluster's part of a run: what its run.json says, and its records by step.

    Where a step or a sync occurs twice, the later record counts. `about` is empty for a run of
    dsx 0.1.
    """

    cluster: int
    about: Record = field(default_factory=dict[str, Any])
    start: Record | None = None
    steps: list[Record] = field(default_factory=list[Record])
    syncs: list[Record] = field(default_factory=list[Record])
    finish: Record | None = None
    members: list[Record] = field(default_factory=list[Record])  # where other clusters train
    heals: list[Record] = field(default_factory=list[Record])
    machine: Record = field(default_factory=dict[str, Any])  # the most of each number of bytes

    @property
    def rows(self) -> list[Record]:
        """The steps, and the end behind them, which counts what was sent last."""
        if not self.steps or self.finish is None or self.finish["step"] < self.steps[-1]["step"]:
            return self.steps
        return [*self.steps, self.finish]


@dataclass(frozen=True)
class Run:
    """A run: its clusters in order, and summary.json as it is; `left_out` are another run's."""

    directory: Path
    clusters: list[ClusterRun]
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    left_out: list[str] = field(default_factory=list[str])


def cluster_file(directory: Path, stem: str, suffix: str, cluster: int) -> Path:
    """Return the path of one cluster's file of a kind: metrics.jsonl, metrics.cluster_1.jsonl."""
    middle = f".cluster_{cluster}" if cluster else ""
    return directory / f"{stem}{middle}{suffix}"


def find_run(path: str | Path) -> Path:
    """Return the folder of the run that a path means; FileNotFoundError says what is there."""
    given = Path(path)
    if not given.exists():
        raise FileNotFoundError(f"no run directory at {given}{_runs_in(given.parent)}")
    folder = given if given.is_dir() else given.parent
    for above in range(_MOST_LEVELS + 1):
        candidate = Path(os.path.normpath(folder / "/".join([".."] * above)))
        if is_run(candidate):
            return candidate
    runs = _runs_in(folder) if given.is_dir() else ""
    if runs:
        raise FileNotFoundError(f"{given} is no run's folder{runs}")
    if list(folder.glob("cluster_*")) or (folder / "dsx.json").exists():
        advice = "; this is a checkpoint outside of its run's folder: give that folder"
    else:
        advice = (
            "; train with dsx.metrics.dir set to it (Megatron: --dsx-metrics-dir), or give the "
            "directory that a run's metrics.dir named"
        )
    raise FileNotFoundError(
        f"{given} holds no metrics*.jsonl and no run.json, nor does what it lies in{advice}"
    )


def is_run(folder: Path) -> bool:
    """Whether a directory is a run's folder."""
    return folder.is_dir() and any(_FILES.fullmatch(path.name) for path in folder.iterdir())


def open_run(path: str | Path) -> Run:
    """Read a run's records. FileNotFoundError or ValueError says what cannot be read."""
    folder = find_run(path)
    abouts = read_about(folder)
    foreign = of_other_runs(abouts)
    files = {m: file for m, file in files_of(folder, "metrics").items() if m not in foreign}
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no metrics*.jsonl: the run has not taken a step yet, or its files "
            "have been moved"
        )
    clusters = [_read_cluster(m, abouts.get(m, {}), file) for m, file in sorted(files.items())]
    left_out = [f"cluster {m}" for m in foreign]
    return Run(folder, clusters, open_summary(folder), left_out)


def open_summary(folder: Path) -> dict[str, Any]:
    """Return what the script's summary.json says, empty without; ValueError for a broken one."""
    path = folder / "summary.json"
    return _read_object(path) if path.exists() else {}


def read_about(folder: Path, cluster: int | None = None) -> dict[int, dict[str, Any]]:
    """Return what every run*.json of a run's folder says, by cluster; ValueError for another's.

    With a `cluster`, that one's alone.
    """
    files = sorted(files_of(folder, "run").items())
    found = {m: (file, _read_object(file)) for m, file in files if cluster in (None, m)}
    for file, about in found.values():
        if about.get("format") != FORMAT or not _has_starts(about):
            raise ValueError(
                f"{file} is no run.json of this version of dsx (format {FORMAT}): move it away, or "
                "give the run another dsx.metrics.dir"
            )
    return {m: about for m, (_, about) in found.items()}


def read_own(folder: Path, cluster: int) -> dict[str, Any] | None:
    """Return what one cluster's run.json says, None if there is none, to go on with it.

    One that is cut off, as a loss of power may leave it, is set aside as `run.json.damaged`;
    ValueError for another's.
    """
    path = cluster_file(folder, "run", ".json", cluster)
    if not path.exists():
        return None
    if not _is_json(path):
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        logger.warning("%s is not whole, and set aside as %s: a new one begins", path, aside.name)
        return None
    return read_about(folder, cluster).get(cluster)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    return True


def sessions_of(folder: Path) -> set[str]:
    """Return the names of all starts of a folder's run; none of a run of dsx 0.1."""
    return _own_sessions(read_about(folder))


def read_records(path: Path) -> list[Record]:
    """Parse a file of records, without lines cut off, as killed runs and full disks leave them.

    ValueError if none of them is a record.
    """
    records: list[Record] = []
    lines = path.read_bytes().splitlines()
    trouble: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number < len(lines):
                trouble.append(f"{path}:{number} is not a JSON record: {error}")
            continue
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number} must be a JSON object, not {record!r:.40}")
        records.append(cast(Record, record))
    if trouble and not records:
        raise ValueError(trouble[0])
    if trouble:
        logger.warning("%s; left out with %d lines like it", trouble[0], len(trouble) - 1)
    return records


def names_of_starts(about: Record) -> set[str]:
    """Return the names (sessions) that a run.json knows its run by."""
    starts = cast("list[Record]", about["starts"])
    told = (start.get(key) for start in starts for key in ("session", "resumed_session"))
    return {name for name in told if name}


def of_other_runs(abouts: Mapping[int, Record]) -> list[int]:
    """Return the clusters whose files are of another run than the one that was started last."""
    own = _own_sessions(abouts)
    return [m for m, about in abouts.items() if not own & names_of_starts(about)]


def files_of(folder: Path, kind: Literal["run", "metrics"]) -> dict[int, Path]:
    """Return the files of a kind, by cluster."""
    found = {path: _FILES.fullmatch(path.name) for path in folder.iterdir()}
    return {
        int(match["cluster"] or 0): path
        for path, match in found.items()
        if match is not None and match["kind"] == kind
    }


def say_end(start: Record) -> str:
    """Say how a start ended, or that it has not said."""
    end = start.get("end")
    if end:
        return f"{end['how']} at step {end['step']}"
    if start.get("host") != socket.gethostname():
        return f"no end recorded: killed, or running on {start.get('host')}"
    return f"running as process {start['pid']}" if is_alive(start["pid"]) else "killed"


def is_alive(process: int) -> bool:
    """Whether a process of this host runs; one that has ended and is not yet fetched does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # no such files here
        return True
    return state not in "ZX"


def _has_starts(about: Record) -> bool:
    starts = about.get("starts")
    return bool(
        isinstance(starts, list)
        and starts
        and all(isinstance(start, dict) and "time" in start for start in starts)
    )


def _own_sessions(abouts: Mapping[int, Record]) -> set[str]:
    """Return the names of the run that was started last: other starts are of other runs."""
    if not abouts:
        return set()
    names = [names_of_starts(about) for about in abouts.values()]
    last = max(abouts.values(), key=lambda about: about["starts"][-1]["time"])
    own = names_of_starts(last)
    for _ in names:  # a cluster that left early shares a name only with one that was there then
        own.update(*(each for each in names if own & each))
    return own


def _read_cluster(cluster: int, about: Record, file: Path) -> ClusterRun:
    steps: dict[int, Record] = {}
    syncs: dict[tuple[Any, ...], Record] = {}
    last: dict[str, Record] = {}
    members: dict[int, Record] = {}
    heals: list[Record] = []
    machine: dict[str, Any] = {}
    for record in read_records(file):
        kind = record.get("kind")
        if kind == "step" and record.get("step") is not None:
            steps[int(record["step"])] = record
        elif kind == "sync":
            key = ("stage", "fragment", "round", "launched_step")
            syncs[tuple(record.get(name) for name in key)] = record
        elif kind == "members":
            members[int(record["step"])] = record
        elif kind in ("start", "finish"):
            last[kind] = record
        elif kind == "healed":
            heals.append(record)
        elif kind == "machine":
            for name, value in record.items():
                if name.endswith("_bytes") and type(value) is int:
                    machine[name] = max(value, machine.get(name, 0))
    ordered = [steps[step] for step in sorted(steps)]
    return ClusterRun(
        cluster, about, last.get("start"), ordered, list(syncs.values()), last.get("finish"),
        [members[step] for step in sorted(members)], heals, machine,
    )  # fmt: skip


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; remove it") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object; remove it")
    return cast("dict[str, Any]", found)


def _runs_in(folder: Path) -> str:
    """Say which runs a directory holds, the newest first; empty if none."""
    if not folder.is_dir():
        return ""
    runs = [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    names = ", ".join(path.name for path in runs[:_MOST_NAMES])
    more = ", ..." if len(runs) > _MOST_NAMES else ""
    return f"; {folder} holds {names}{more}: give one of these runs" if runs else ""
