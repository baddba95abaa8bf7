"""A run's records as the figures of its clusters: what `dsx watch` serves as `/metrics`.

The names are those of each rank 0's own page (figures.py). Counters count the whole run here, not
one process, and only grow: what a run takes again after a way back counts again, as it does there,
and what was counted before its file was begun anew does not. A cluster is shown once its file has
been read to the end, so that reading it is not taken for the run's own speed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from dsx.telemetry.figures import MOST, Figures
from dsx.telemetry.run_folder import Record
from dsx.telemetry.sound import is_number, seconds_of

_MOST_TEXT = 64  # characters of a label
_OTHER = "other"  # an alarm that this dsx does not know


class Replay:
    """One cluster's figures, from its records one after the other, and from its run.json."""

    def __init__(self, cluster: int, alarms: Collection[str], folder: Path | None) -> None:
        """`folder` is where the records lie, if its disk is to be shown."""
        self._cluster, self._alarms, self._folder = cluster, {*alarms}, folder
        self._counted_until = self._last_time = 0.0
        self._about: Record = {}
        self._tokens: float | None = None
        self._loss: float | None = None
        self._planned: float | None = None
        self._members: tuple[int, ...] = ()
        self._skipped = 0.0
        self._rollbacks = 0
        self.figures = self._figures(1)
        self.is_whole = False  # read to its end at least once

    def _figures(self, num_clusters: int) -> Figures:
        asked: Mapping[str, Callable[[], float | None]] = {
            "dsx_loss": lambda: self._loss,
            "dsx_tokens_total": lambda: self._tokens,
            "dsx_planned_steps": lambda: self._planned,
            "dsx_line_limit_bytes_per_second": self._line_limit,
            "dsx_missing_records": self._missing,
            "dsx_checkpoint_step": lambda: self._checkpoint("step"),
            "dsx_checkpoint_timestamp_seconds": lambda: self._checkpoint("time"),
            "dsx_checkpoint_copied_step": self._copied,
            "dsx_rollbacks_total": lambda: self._rollbacks,
        }
        return Figures(self._cluster, num_clusters, True, sorted(self._alarms), asked)

    def anew(self) -> None:
        """The file is read anew: what has been counted is not counted again."""
        self._counted_until = max(self._counted_until, self._last_time)

    def take(self, record: Record) -> None:
        """Take a record that is as dsx writes it."""
        when = float(record["time"])
        if when <= self._counted_until:
            return
        self._last_time = max(self._last_time, when)
        kind = record["kind"]
        if kind == "step":
            self._take_step(record)
        elif kind == "sync":
            self._take_sync(record)
        elif kind == "start":
            self._take_start(record)
        elif kind == "machine":
            self.figures.machine(record)
        elif kind == "members":
            self._members = tuple(sorted({int(m) for m in record["members"]}))
        elif kind == "planned" and record.get("planned_steps") is not None:
            self._planned = float(record["planned_steps"])

    def tell(self, about: Record) -> None:
        """Take what run.json says."""
        if about is self._about:
            return
        self._about = about
        start: Record = about["starts"][-1]
        settings: Record = (start.get("config") or {}).get("resolved") or {}
        versions: Any = start.get("versions")
        version = versions.get("dsx") if isinstance(versions, dict) else None  # type: ignore[misc]
        if settings.get("preset"):
            preset = str(settings["preset"])[:_MOST_TEXT]  # type: ignore[index]
            self.figures.started(preset, str(version or "unknown")[:_MOST_TEXT])
        starts: list[Record] = about["starts"]
        self._rollbacks = sum(bool(start.get("rolled_back")) for start in starts)

    def _take_start(self, record: Record) -> None:
        clusters = int(record.get("num_clusters") or self._cluster + 1)
        if not self._members:
            self._members = tuple(range(clusters))
            self.figures = self._figures(clusters)
            about, self._about = self._about, {}
            if about:
                self.tell(about)
        step = int(record["step"]) if is_number(record.get("step")) else 0
        self.figures.begin(step, int(self._skipped), self._folder)

    def _take_step(self, record: Record) -> None:
        told = {name: record.get(name) or 0.0 for name in ("seconds", "blocked_seconds")}
        skipped = max(float(record.get("skipped_steps") or 0), 0.0)
        if skipped < self._skipped:  # it has gone back
            self.figures.begin(int(record["step"]), int(skipped), self._folder)
        self._skipped = skipped
        sound = {name: max(value, 0.0) for name, value in told.items()}
        self.figures.step(
            {"step": record["step"], "skipped_steps": int(skipped), **sound}, self._members
        )
        if is_number(record.get("loss")):
            self._loss = float(record["loss"])
        if record.get("tokens") is not None:
            self._tokens = (self._tokens or 0.0) + max(float(record["tokens"]), 0.0)

    def _take_sync(self, record: Record) -> None:
        numbers = {
            name: value for name, value in record.items()
            if not (name.endswith(("_seconds", "_norm")) and not is_number(value))
        }  # fmt: skip
        for name in ("wait_seconds", "transfer_seconds", "coding_seconds", "commit_seconds"):
            numbers[name] = max(float(numbers.get(name) or 0.0), 0.0)
        told = [str(alarm) for alarm in record.get("guard_alarms") or ()]
        known = [alarm if alarm in self._alarms else _OTHER for alarm in told]
        self.figures.sync({
            **numbers, "guard_alarms": known, "interval": record.get("interval") or 0,
            "bytes_sent": max(float(record.get("bytes_sent") or 0), 0.0),
        })  # fmt: skip

    def _line_limit(self) -> float | None:
        rate = (self._setting("link") or {}).get("rate_mbit")
        return 125_000.0 * rate if rate else None

    def _setting(self, name: str) -> Any:
        start: Record = self._about["starts"][-1] if self._about else {}
        return ((start.get("config") or {}).get("resolved") or {}).get(name)

    def _checkpoint(self, name: str) -> float | None:
        saved: list[Record] = self._about.get("checkpoints") or []
        if not saved:
            return None
        return float(saved[-1]["step"]) if name == "step" else seconds_of(saved[-1]["time"])

    def _copied(self) -> float | None:
        saved: list[Record] = self._about.get("checkpoints") or []
        return max((float(one["step"]) for one in saved if one.get("copied_to")), default=None)

    def _missing(self) -> float:
        start: Record = self._about["starts"][-1] if self._about else {}
        missing: Any = (start.get("end") or {}).get("missing")
        values: list[Any] = list(missing.values()) if isinstance(missing, dict) else []  # type: ignore[misc]
        return sum(float(value) for value in values if is_number(value))


class Replays:
    """All clusters of a run, the first ones at least: a page of bounded length."""

    def __init__(self, alarms: Collection[str], folder: Path | None) -> None:
        self._alarms, self._folder = alarms, folder
        self._of: dict[int, Replay] = {}

    def of(self, cluster: int) -> Replay | None:
        """Return a cluster's; None of one more than there is room for."""
        if cluster not in self._of and len(self._of) < MOST:
            self._of[cluster] = Replay(cluster, self._alarms, self._folder)
        return self._of.get(cluster)

    def shown(self, without: Collection[int]) -> list[Figures]:
        """Return the figures of all whose files have been read to their ends, in order."""
        found = sorted(self._of.items())
        return [one.figures for m, one in found if one.is_whole and m not in without]
