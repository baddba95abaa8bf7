"""What is known of one cluster: its records, taken one after the other, as tables and last words.

A step that comes again, as after a way back to a checkpoint, takes the place of what there was.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from dsx.telemetry.run_folder import Record
from dsx.telemetry.watch.table import Merge, Table

NAN = math.nan
_PLACE: dict[str, Merge] = {"step": "last", "time": "last", "tokens": "last"}
_STEPS: dict[str, Merge] = {
    **_PLACE, "sent": "last", "seconds": "sum", "blocked": "sum", "trained": "sum", "count": "sum",
}  # fmt: skip
_LOSS: dict[str, Merge] = {**_PLACE, "value": "mean", "low": "low", "high": "high"}
SUMS = ("bytes_sent", "wait_seconds", "transfer_seconds", "coding_seconds", "commit_seconds")
FIGURES = (  # of a sync, where it has them
    "pseudo_gradient_norm", "mean_norm", "autocorrelation", "cluster_cosine", "norm_ratio",
    "effective_gain", "interval", "delay", "unsent_norm", "correction_ratio", "look_ahead_norm",
    "rank", "captured_energy",
)  # fmt: skip
_SYNCS: dict[str, Merge] = {
    **_PLACE, **dict.fromkeys(SUMS, "sum"), "count": "sum", **dict.fromkeys(FIGURES, "known"),
}  # fmt: skip
LEFT_OUT = ("refused_by", "differed_in", "uncommitted_by", "idle_in")
_RECENT_SYNCS = 512  # whose way is drawn
_RECENT_STEPS = 2048  # whose end is known in time
_RECENT_EVENTS = 100


class WatchedCluster:
    """One cluster's records so far; `take` is called with each of its lines."""

    def __init__(self, cluster: int) -> None:
        self.cluster = cluster
        self.counts_tokens = True  # not where only some of the steps are looked at
        self.begin()

    def begin(self) -> None:
        """Forget all records: their file is read anew."""
        self.start: Record = {}
        self.steps, self.losses = Table(_STEPS), Table(_LOSS)
        self.validation, self.syncs = Table(_LOSS), Table(_SYNCS)
        self.last_step: Record = {}
        self.last_sync: Record = {}
        self.recent: deque[Record] = deque(maxlen=_RECENT_SYNCS)
        self.ends: deque[tuple[int, float, float]] = deque(maxlen=_RECENT_STEPS)
        self.members: list[Record] = []
        self.events: deque[Record] = deque(maxlen=_RECENT_EVENTS)
        self.left_out = dict.fromkeys(LEFT_OUT, 0)
        self.last_left_out: Record = {}
        self.rungs: list[str] = []
        self.alarms: dict[str, int] = {}
        self.fragments: dict[tuple[int, int], int] = {}  # elements, by stage and number
        self.has_had_all = False  # fragments: one of them has come again
        self.num_syncs = 0
        self.num_unreadable = 0
        self.total_steps: int | None = None
        self.finish: Record = {}
        self.last_time = 0.0
        self._tokens = NAN

    @property
    def has_records(self) -> bool:
        """Whether there is any."""
        return self.last_time > 0

    def take(self, line: bytes) -> None:
        """Take a line; one that is no record is counted."""
        try:
            record: dict[str, Any] = json.loads(line)
            kind, when = record["kind"], float(record.get("time", 0.0))
            if kind == "step":
                self._take_step(record, when)
            elif kind == "sync":
                self._take_sync(record, when)
            else:
                self._take_other(str(kind), record)
        except (ValueError, TypeError, AttributeError, KeyError):
            self.num_unreadable += 1
            return
        self.last_time = max(self.last_time, when)

    def _take_step(self, record: Record, when: float) -> None:
        step = int(record["step"])
        last = self.steps.last()
        if last is not None and step <= last:
            self._go_back(step)
        trained = _number(record, "tokens")
        if not math.isnan(trained) and self.counts_tokens:
            self._tokens = trained + (0.0 if math.isnan(self._tokens) else self._tokens)
        seconds = _number(record, "seconds")
        self.steps.append((
            step, when, self._tokens, _number(record, "bytes_sent"), seconds,
            _number(record, "blocked_seconds"), trained, 1,
        ))  # fmt: skip
        if "loss" in record:
            loss = _number(record, "loss")
            self.losses.append((step, when, self._tokens, loss, loss, loss))
        if _is_number(record.get("total_steps")):
            self.total_steps = int(record["total_steps"])
        self.ends.append((step, when, seconds))
        self.last_step = record

    def _take_sync(self, record: Record, when: float) -> None:
        applied, launched = int(record["applied_step"]), int(record["launched_step"])
        last = self.syncs.last()
        figures = {**record, "delay": applied - launched}
        row = [max(applied, last or 0), when, self._tokens]
        row += [_number(record, name) for name in SUMS]
        self.syncs.append((*row, 1, *(_number(figures, name) for name in FIGURES)))
        self.num_syncs += 1
        place = int(record.get("stage", 0)), int(record["fragment"])
        self.has_had_all = self.has_had_all or place in self.fragments
        self.fragments[place] = int(record.get("numel") or 0)
        self.recent.append(record)
        self.last_sync = record
        for name in LEFT_OUT:
            if record.get(name):
                self.left_out[name] += 1
                self.last_left_out = record
        for alarm in record.get("guard_alarms") or ():
            self.alarms[str(alarm)] = self.alarms.get(str(alarm), 0) + 1
        self.rungs = list(record.get("guard_rungs") or self.rungs)

    def _take_other(self, kind: str, record: Record) -> None:
        if kind == "start":
            self.start = record
        elif kind == "finish":
            self.finish = record
        elif kind == "members":
            self.members.append(record)
        elif kind == "validation":
            loss = _validation_loss(record)
            if loss is not None:
                step = float(record["step"])
                when = _number(record, "time")
                self.validation.append((step, when, self._tokens, loss, loss, loss))
        elif kind in ("rollback", "order"):
            self.events.append(record)

    def _go_back(self, step: int) -> None:
        """Drop what there is from a step on: it is taken again."""
        for table in (self.steps, self.losses, self.validation, self.syncs):
            table.cut(step)
        self.ends = deque((end for end in self.ends if end[0] < step), maxlen=_RECENT_STEPS)
        self.recent = deque(
            (sync for sync in self.recent if sync["applied_step"] < step), maxlen=_RECENT_SYNCS
        )
        self.finish = {}
        tokens = self.steps.read()["tokens"]
        self._tokens = float(tokens[-1]) if len(tokens) else NAN


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(cast("float", value)) if _is_number(value) else NAN


def _validation_loss(record: Record) -> float | None:
    """Return what a record of validation calls its loss, by the names that trainers have."""
    for name in ("loss", "val_loss", "eval_loss", "valid_loss", "validation_loss"):
        if _is_number(record.get(name)):
            return float(record[name])
    return None
