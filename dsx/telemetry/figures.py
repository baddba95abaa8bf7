"""A cluster in numbers, as of now: what a page shows of a run that goes on (prometheus.py).

Counters begin with the process, and only grow: a run that goes on from a checkpoint, or goes back
to one, counts what this process has done. Where the run is, is a gauge. What is not known is left
out. Series are few: of a label there are as many as `LABELS` says, and no more.

Training tells, at its boundaries; any thread may read.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from dsx.telemetry.behind import Behind

logger = logging.getLogger(__name__)
MOST = 64  # fragments, and members, that have series of their own
_DISK_SECONDS = 15.0  # between two looks at a disk
_Labels = tuple[str, ...]

LABELS = {
    "cluster": "the number of the cluster whose page it is",
    "member": f"the number of any cluster of the run, of the first {MOST}",
    "stage": "the pipeline stage, 0 where there is one",
    "fragment": f"the number of a fragment, of the first {MOST} that have synced",
    "alarm": "the kind of an alarm of the guard",
    "of": "whose folder lies on the disk: `records` or `checkpoints`",
    "preset": "the method's name",
    "version": "that of dsx",
}


@dataclass(frozen=True)
class Figure:
    """One number: `labels` are those beside `cluster`, which all have."""

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    labels: _Labels = ()


def _counter(name: str, meaning: str, *labels: str) -> Figure:
    return Figure(f"dsx_{name}_total", "counter", meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Figure:
    return Figure(f"dsx_{name}", "gauge", meaning, labels)


_OF_A_FRAGMENT = ("stage", "fragment")
FIGURES = (
    _gauge("run_info", "What runs; always 1.", "preset", "version"),
    _gauge("step", "Inner steps that the run has taken, skipped ones included."),
    _gauge("planned_steps", "Inner steps that the run is to take, where a framework tells."),
    _gauge("loss", "The last loss that log_step was told, else one that was seen of training."),
    _counter("steps", "Inner steps taken by this process, skipped ones included."),
    _counter("step_seconds", "Seconds that those steps have taken."),
    _counter("blocked_seconds", "Seconds of them in which dsx held training up."),
    _counter("skipped_steps", "Inner steps that the optimizer has skipped."),
    _counter("tokens", "Tokens trained on, as log_step was told, else as seen of training."),
    _counter("syncs", "Transfers of a fragment that have come and were applied, or left out."),
    _counter("sent_bytes", "Bytes handed to the network for other clusters, by all ranks."),
    _counter("wait_seconds", "Seconds that training waited for transfers, on the slowest rank."),
    _counter("transfer_seconds", "Seconds that transfers have taken, on the slowest rank."),
    _counter("coding_seconds", "Seconds of transfers that were spent on coding and sums."),
    _counter("commit_seconds", "Seconds of transfers until all had told that they hold the same."),
    _gauge("interval_steps", "Inner steps from one launch of a fragment to the next: H."),
    _gauge("delay_steps", "Inner steps from a launch until its mean was applied, of the last one."),
    _gauge("line_limit_bytes_per_second", "What the cluster may send by link.rate_mbit or hours."),
    _gauge("line_measured_bytes_per_second", "What it sent in an all-reduce of dsx net-test."),
    _counter("refused_rounds", "Rounds left out: a cluster's values not finite, or far too large."),
    _counter("parity_mismatches", "Rounds left out because clusters held different models."),
    _counter("uncommitted_rounds", "Rounds left out because clusters came to different means."),
    _counter("idle_rounds", "Rounds in which a cluster took no inner step."),
    _gauge("fragment_rounds", "Outer steps taken of a fragment.", *_OF_A_FRAGMENT),
    _gauge(
        "fragment_pseudo_gradient_norm", "Norm of what this cluster sent last.", *_OF_A_FRAGMENT
    ),
    _gauge("fragment_mean_norm", "Norm of the mean that came last.", *_OF_A_FRAGMENT),
    _gauge("guard_cluster_cosine", "How alike clusters' contributions are.", *_OF_A_FRAGMENT),
    _gauge(
        "guard_norm_ratio", "Norm of the cluster farthest from the others, by theirs.",
        *_OF_A_FRAGMENT,
    ),
    _gauge("guard_autocorrelation", "Cosine of a mean with the one before.", *_OF_A_FRAGMENT),
    _gauge("guard_effective_gain", "How far an outer step goes, by its mean.", *_OF_A_FRAGMENT),
    _counter("guard_alarms", "Alarms that the guard has told.", "alarm"),
    _gauge("guard_rungs", "Rungs of the guard's ladder that have been taken."),
    _gauge("clusters", "Clusters that the run was started for."),
    _gauge("members", "Clusters that train now."),
    _gauge("member_trains", "1 of a cluster that trains now, else 0.", "member"),
    _counter("rollbacks", "Times that training has gone back to a checkpoint."),
    _gauge("checkpoint_step", "The step of the last checkpoint that this process has completed."),
    _gauge("checkpoint_timestamp_seconds", "When that was, since 1970."),
    _gauge("checkpoint_copied_step", "The step of the last one that is at its remote place, too."),
    _gauge("disk_free_bytes", "Bytes that are free on a disk.", "of"),
    _gauge("disk_size_bytes", "Bytes that a disk has.", "of"),
    _gauge("process_bytes", "Bytes of the host's memory that the first rank's process holds."),
    _gauge("outer_state_bytes", "Bytes that outer training has allocated on the first rank."),
    _gauge("outer_state_planned_bytes", "Bytes that it was to allocate there."),
    _gauge("device_bytes", "Bytes of its accelerator that the first rank's torch holds."),
    _gauge("device_peak_bytes", "Bytes that tensors took there at most."),
    _gauge("device_size_bytes", "Bytes that the accelerator has."),
    _gauge("link_round_trip_seconds", "The last round trip of a short message.", "member"),
    _gauge("link_least_round_trip_seconds", "The least round trip that was seen.", "member"),
    _counter("link_sent_bytes", "Bytes that the first rank sent over a link.", "member"),
    _counter("link_received_bytes", "Bytes that came to the first rank over a link.", "member"),
    _gauge("link_measured_bytes_per_second", "What it sent there in dsx net-test.", "member"),
    _gauge("missing_records", "Records that could not be written."),
)  # fmt: skip
_SUMS = ("wait_seconds", "transfer_seconds", "coding_seconds", "commit_seconds")
_LEFT_OUT = {
    "refused_by": "dsx_refused_rounds_total",
    "differed_in": "dsx_parity_mismatches_total",
    "uncommitted_by": "dsx_uncommitted_rounds_total",
    "idle_in": "dsx_idle_rounds_total",
}
_MACHINE = {
    "process_bytes": "dsx_process_bytes",
    "outer_bytes": "dsx_outer_state_bytes",
    "outer_planned_bytes": "dsx_outer_state_planned_bytes",
    "device_bytes": "dsx_device_bytes",
    "device_peak_bytes": "dsx_device_peak_bytes",
    "device_total_bytes": "dsx_device_size_bytes",
    "measured_bytes_per_second": "dsx_line_measured_bytes_per_second",
}
_LINK = {
    "round_trip_seconds": "dsx_link_round_trip_seconds",
    "least_seconds": "dsx_link_least_round_trip_seconds",
    "measured_bytes_per_second": "dsx_link_measured_bytes_per_second",
}
_LINK_COUNTS = {
    "sent_bytes": "dsx_link_sent_bytes_total",
    "received_bytes": "dsx_link_received_bytes_total",
}
_FRAGMENTS = {
    "round": "dsx_fragment_rounds",
    "pseudo_gradient_norm": "dsx_fragment_pseudo_gradient_norm",
    "mean_norm": "dsx_fragment_mean_norm",
    "cluster_cosine": "dsx_guard_cluster_cosine",
    "norm_ratio": "dsx_guard_norm_ratio",
    "autocorrelation": "dsx_guard_autocorrelation",
    "effective_gain": "dsx_guard_effective_gain",
}


class Figures:
    """One cluster's, kept by its first rank; every method is a no-op where nobody shows them.

    `asked` are figures that are read where they are, None where there is nothing yet.
    """

    def __init__(
        self,
        cluster: int,
        num_clusters: int,
        is_shown: bool,
        alarms: Iterable[str] = (),
        asked: Mapping[str, Callable[[], float | None]] | None = None,
        behind: Behind | None = None,
    ) -> None:
        self.cluster = cluster
        self._num_clusters = num_clusters
        self._is_shown = is_shown
        self._asked = dict(asked or {})
        self._behind = behind or Behind()
        self._lock = Lock()
        self._values: dict[str, dict[_Labels, float]] = {figure.name: {} for figure in FIGURES}
        asked_for = self._asked.keys()
        for figure in FIGURES:  # a counter that appears with its first event hides that one
            if figure.kind == "counter" and not figure.labels and figure.name not in asked_for:
                self._set(figure.name, 0)
        for alarm in alarms:
            self._set("dsx_guard_alarms_total", 0, alarm)
        self._set("dsx_guard_rungs", 0)
        self._set("dsx_clusters", num_clusters)
        self._members: Sequence[int] = ()
        self._fragments: set[_Labels] = set()
        self._folders: dict[str, Path] = {}
        self._disks_at = 0.0
        self._skipped = 0
        self._counted: dict[tuple[str, str], float] = {}  # of links, which begin with a process

    def read(self) -> dict[str, dict[_Labels, float]]:
        """Return what is known by now: by name, by the values of its labels."""
        with self._lock:
            found = {name: dict(values) for name, values in self._values.items()}
        for name, ask in self._asked.items():
            if (value := ask()) is not None:
                found[name] = {(): float(value)}
        return found

    def started(self, preset: str, version: str) -> None:
        """Take what runs."""
        with self._lock:
            self._values["dsx_run_info"] = {(preset, version): 1.0}

    def begin(self, step: int, skipped_steps: int, folder: Path | None) -> None:
        """Go on from a step, in the run's folder, if it has one."""
        self._set("dsx_step", step)
        self._skipped = skipped_steps
        if folder is not None:
            self._folders["records"] = folder

    def step(self, record: Mapping[str, Any], members: Sequence[int]) -> None:
        """Take the record of a step, and who trains by then."""
        if not self._is_shown:
            return
        self._set("dsx_step", record["step"])
        self._add("dsx_steps_total", 1)
        self._add("dsx_step_seconds_total", record["seconds"])
        self._add("dsx_blocked_seconds_total", record["blocked_seconds"])
        self._add("dsx_skipped_steps_total", record["skipped_steps"] - self._skipped)
        self._skipped = record["skipped_steps"]
        if members != self._members:
            self._members = members
            self._set("dsx_members", len(members))
            for member in range(min(self._num_clusters, MOST)):
                self._set("dsx_member_trains", member in members, str(member))
        self._look_at_disks()

    def sync(self, record: Mapping[str, Any]) -> None:
        """Take the record of a sync, of the whole cluster."""
        if not self._is_shown:
            return
        self._add("dsx_syncs_total", 1)
        self._add("dsx_sent_bytes_total", record["bytes_sent"])
        for name in _SUMS:
            self._add(f"dsx_{name}_total", record.get(name) or 0.0)
        for name, figure in _LEFT_OUT.items():
            self._add(figure, bool(record.get(name)))
        self._set("dsx_interval_steps", record["interval"])
        self._set("dsx_delay_steps", record["applied_step"] - record["launched_step"])
        for alarm in record.get("guard_alarms", ()):
            self._add("dsx_guard_alarms_total", 1, alarm)
        if "guard_rungs" in record:
            self._set("dsx_guard_rungs", len(record["guard_rungs"]))
        labels = str(record.get("stage", 0)), str(record["fragment"])
        if self._has_place(labels):
            for name, figure in _FRAGMENTS.items():
                if record.get(name) is not None:
                    self._set(figure, record[name], *labels)

    def machine(self, record: Mapping[str, Any]) -> None:
        """Take what the process holds, and what its links are like; from any thread."""
        if not self._is_shown:
            return
        for name, figure in _MACHINE.items():
            if record.get(name) is not None:
                self._set(figure, record[name])
        for link in record.get("links", ()):
            if link["to"] >= MOST:
                continue
            member = str(link["to"])
            for name, figure in _LINK.items():
                if link.get(name) is not None:
                    self._set(figure, link[name], member)
            for name, figure in _LINK_COUNTS.items():
                if link.get(name) is not None:
                    self._count_to(figure, link[name], member)

    def saved(self, path: Path, step: int) -> None:
        """Take a checkpoint that is complete."""
        self._set("dsx_checkpoint_step", step)
        self._set("dsx_checkpoint_timestamp_seconds", time.time())
        self._folders["checkpoints"] = path.parent
        self._disks_at = 0.0

    def copied(self, step: int) -> None:
        """Take a checkpoint that is complete at its remote place, too."""
        self._set("dsx_checkpoint_copied_step", step)

    def rolled_back(self) -> None:
        """Count that training has gone back."""
        self._add("dsx_rollbacks_total", 1)

    def _has_place(self, labels: _Labels) -> bool:
        """Whether a fragment has series of its own; the first one that has none is told of."""
        if labels in self._fragments:
            return True
        if len(self._fragments) < MOST:
            self._fragments.add(labels)
            return True
        if len(self._fragments) == MOST:
            self._fragments.add(("", ""))  # that it has been told
            logger.info("metrics.prometheus: fragments beyond the first %d have no series", MOST)
        return False

    def _look_at_disks(self) -> None:
        """Have the disks looked at where records are written: one that hangs holds nobody up."""
        now = time.monotonic()
        if now - self._disks_at < _DISK_SECONDS and self._disks_at:
            return
        self._disks_at = now
        for of, folder in self._folders.items():
            self._behind.do(lambda of=of, folder=folder: self._look_at_disk(of, folder), folder, 0)

    def _look_at_disk(self, of: str, folder: Path) -> None:
        try:
            usage = shutil.disk_usage(folder)
        except OSError:  # a folder that is not made yet, or gone: nothing is known of its disk
            self._drop("dsx_disk_free_bytes", of)
            self._drop("dsx_disk_size_bytes", of)
        else:
            self._set("dsx_disk_free_bytes", usage.free, of)
            self._set("dsx_disk_size_bytes", usage.total, of)

    def _set(self, name: str, value: float, *labels: str) -> None:
        with self._lock:
            self._values[name][labels] = float(value)

    def _drop(self, name: str, *labels: str) -> None:
        with self._lock:
            self._values[name].pop(labels, None)

    def _count_to(self, name: str, value: float, member: str) -> None:
        """Take what a link has counted; less than before is of a link that has begun anew."""
        before = self._counted.get((name, member), 0.0)
        self._counted[name, member] = value
        self._add(name, value - before if value >= before else value, member)

    def _add(self, name: str, value: float, *labels: str) -> None:
        with self._lock:
            of_name = self._values[name]
            of_name[labels] = of_name.get(labels, 0.0) + float(value)
