"""What is known of one cluster: its records, taken one after the other, as tables and last words.

A step that comes again, as after a way back to a checkpoint, takes the place of what there was.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsx.telemetry.run_folder import Record
from dsx.telemetry.sound import is_number, sound_record
from dsx.telemetry.watch.open_transfers import OpenTransfers
from dsx.telemetry.watch.table import Merge, Table

NAN = math.nan
_PLACE: dict[str, Merge] = {"step": "last", "time": "last", "tokens": "last"}
_STEPS: dict[str, Merge] = {
    **_PLACE, "sent": "last", "seconds": "sum", "blocked": "sum", "trained": "sum", "count": "sum",
}  # fmt: skip
_LOSS: dict[str, Merge] = {**_PLACE, "value": "mean", "low": "low", "high": "high"}
_OF_STEP = ("tokens", "bytes_sent", "seconds", "blocked_seconds")
SUMS = ("bytes_sent", "wait_seconds", "transfer_seconds", "coding_seconds", "commit_seconds")
FIGURES = (  # of a sync, where it has them
    "pseudo_gradient_norm", "mean_norm", "autocorrelation", "cluster_cosine", "norm_ratio",
    "effective_gain", "interval", "unsent_norm", "correction_ratio", "look_ahead_norm",
    "rank", "captured_energy",
)  # fmt: skip
_SYNCS: dict[str, Merge] = {
    **_PLACE, **dict.fromkeys(SUMS, "sum"), "count": "sum", "delay": "known",
    **dict.fromkeys(FIGURES, "known"),
}  # fmt: skip
_TRIP = "round_trip_seconds"
_BYTES = ("process_bytes", "device_bytes", "outer_bytes")
_MACHINE: dict[str, Merge] = {
    **_PLACE, **dict.fromkeys(_BYTES, "high"), _TRIP: "known",
}  # fmt: skip
LEFT_OUT = ("refused_by", "differed_in", "uncommitted_by", "idle_in")
MOST_ROWS = 1 << 17  # of a table of steps; of syncs half of it: some 30 MB altogether
_RECENT_SYNCS = 512  # whose way is drawn
_RECENT_STEPS = 2048  # whose end is known in time
_RECENT_EVENTS = 100
_RECENT_LOOKS = 7  # at the machine: a minute
_decode = json.JSONDecoder().decode


class WatchedCluster:
    """One cluster's records so far; `take` is called with each of its lines.

    `heard` is called with each record that is as dsx writes it.
    """

    def __init__(self, cluster: int, most_rows: int = MOST_ROWS) -> None:
        self.cluster = cluster
        self._most_rows = most_rows
        self.heard: Callable[[Record], object] = _nobody
        self.counts_tokens = True  # not where only some of the steps are looked at
        self.begin()

    def begin(self) -> None:
        """Forget all records: their file is read anew."""
        self.start: Record = {}
        most = self._most_rows
        self.steps, self.losses = Table(_STEPS, most), Table(_LOSS, most)
        self.validation, self.syncs = Table(_LOSS, most), Table(_SYNCS, most // 2)
        self.machine = Table(_MACHINE, most // 4)
        self.looks: deque[Record] = deque(maxlen=_RECENT_LOOKS)
        self.open_transfers = OpenTransfers()
        self.last_step: Record = {}
        self.last_sync: Record = {}
        self.recent: deque[Record] = deque(maxlen=_RECENT_SYNCS)
        self.ends: deque[tuple[int, float, float]] = deque(maxlen=_RECENT_STEPS)
        self.members: list[Record] = []
        self.events: deque[Record] = deque(maxlen=_RECENT_EVENTS)
        self.left_out = dict.fromkeys(LEFT_OUT, 0)
        self.last_left_out: Record = {}
        self.left_out_by: Counter[tuple[str, int]] = Counter()  # rounds, by reason and cluster
        self.rungs: list[str] = []
        self.alarms: dict[str, int] = {}
        self.fragments: dict[tuple[int, int], int] = {}  # elements, by stage and number
        self.has_had_all = False  # fragments: one of them has come again
        self.num_syncs = 0
        self.num_unreadable = 0
        self.planned_steps: int | None = None
        self.finish: Record = {}
        self.last_time = 0.0
        self._tokens = NAN

    @property
    def has_records(self) -> bool:
        """Whether there is any."""
        return self.last_time > 0

    def take(self, line: bytes) -> None:
        """Take a line; one that is no record as dsx writes it is counted."""
        try:
            told: dict[str, Any] = _decode(line.decode())
            record = sound_record(told)
            if record is None:
                self.num_unreadable += 1
                return
            kind, when = record["kind"], float(record["time"])
            if kind == "step":
                self._take_step(record, when, "loss" in told)
            elif kind == "sync":
                self._take_sync(record, when)
            else:
                self._take_other(kind, record, when)
            self.heard(record)
        except (ValueError, RecursionError):  # cut off, or nested without end
            self.num_unreadable += 1
            return
        self.last_time = max(self.last_time, when)

    def _take_step(self, record: Record, when: float, has_loss: bool) -> None:
        step = int(record["step"])
        last = self.steps.last()
        if last is not None and step <= last:
            self._go_back(step)
        trained, sent, seconds, blocked = _numbers(record, _OF_STEP)
        if not math.isnan(trained) and self.counts_tokens:
            self._tokens = trained + (0.0 if math.isnan(self._tokens) else self._tokens)
        self.steps.append((step, when, self._tokens, sent, seconds, blocked, trained, 1))
        if has_loss:
            (loss,) = _numbers(record, ("loss",))
            self.losses.append((step, when, self._tokens, loss, loss, loss))
        self.ends.append((step, when, seconds))
        self.open_transfers.take_step(record, when)
        self.last_step = record

    def _take_sync(self, record: Record, when: float) -> None:
        applied, launched = int(record["applied_step"]), int(record["launched_step"])
        last = self.syncs.last()
        place = max(applied, last or 0), when, self._tokens
        figures = _numbers(record, FIGURES)
        self.syncs.append((*place, *_numbers(record, SUMS), 1, applied - launched, *figures))
        self.num_syncs += 1
        place = int(record.get("stage", 0)), int(record["fragment"])
        self.has_had_all = self.has_had_all or place in self.fragments
        self.fragments[place] = int(record.get("numel") or 0)
        self.recent.append(record)
        self.open_transfers.take_sync(record)
        self.last_sync = record
        for name in LEFT_OUT:
            if record.get(name):
                self.left_out[name] += 1
                self.last_left_out = record
                clusters = [m for m in record[name] if type(m) is int]
                self.left_out_by.update((name, m) for m in dict.fromkeys(clusters))
        for alarm in record.get("guard_alarms") or ():
            self.alarms[str(alarm)] = self.alarms.get(str(alarm), 0) + 1
        self.rungs = list(record.get("guard_rungs") or self.rungs)

    def _take_other(self, kind: str, record: Record, when: float) -> None:
        if kind == "start":
            self.start = record
            self.open_transfers.clear()
        elif kind == "finish":
            self.finish = record
            self.open_transfers.clear()
        elif kind == "launch" and self.counts_tokens:
            self.open_transfers.take_launch(record, when)
        elif kind == "machine":
            self._take_look(record, when)
        elif kind == "planned":
            self.planned_steps = record.get("planned_steps")
        elif kind == "members":
            self.members.append(record)
        elif kind == "validation":
            loss = _validation_loss(record)
            if loss is not None:
                step = float(record["step"])
                (when,) = _numbers(record, ("time",))
                self.validation.append((step, when, self._tokens, loss, loss, loss))
        elif kind in ("rollback", "order", "healed", "not_saved", "not_copied"):
            self.events.append(record)

    def _take_look(self, record: Record, when: float) -> None:
        """Take what the process holds; of its links the longest round trip."""
        trips = [trip for link in record.get("links") or () if (trip := link.get(_TRIP))]
        step = max(int(record["step"]), self.machine.last() or 0)
        held = _numbers(record, _BYTES)
        self.machine.append((step, when, self._tokens, *held, max(trips, default=NAN)))
        self.looks.append(record)

    def _go_back(self, step: int) -> None:
        """Drop what there is from a step on: it is taken again."""
        for table in (self.steps, self.losses, self.validation, self.syncs, self.machine):
            table.cut(step)
        self.open_transfers.go_back(step)
        self.ends = deque((end for end in self.ends if end[0] < step), maxlen=_RECENT_STEPS)
        self.recent = deque(
            (sync for sync in self.recent if sync["applied_step"] < step), maxlen=_RECENT_SYNCS
        )
        self.finish = {}
        tokens = self.steps.read()["tokens"]
        self._tokens = float(tokens[-1]) if len(tokens) else NAN


def _nobody(record: Record) -> None:
    """Whom nobody has asked to hear."""


def _numbers(record: Mapping[str, Any], names: Sequence[str]) -> list[float]:
    """Return what a record has under some names, NaN where that is no number."""
    values = map(record.get, names)
    return [float(value) if is_number(value) else NAN for value in values]  # type: ignore[arg-type]


def _validation_loss(record: Record) -> float | None:
    """Return what a record of validation calls its loss, by the names that trainers have."""
    for name in ("loss", "val_loss", "eval_loss", "valid_loss", "validation_loss"):
        if is_number(record.get(name)):
            return float(record[name])
    return None
