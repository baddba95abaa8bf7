"""What a run came to: its time by what took it, its bytes, losses, and what went wrong.

What no record has is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dsx.telemetry.run_folder import Record
from dsx.telemetry.sound import sound_summary
from dsx.telemetry.watch.cluster import LEFT_OUT, WatchedCluster
from dsx.telemetry.watch.run import WatchedRun
from dsx.telemetry.watch.state import state

_LAST_LOSSES = 10


@dataclass(frozen=True)
class ClusterTime:
    """Where one cluster's time went, in seconds; `whole` is from its first to its last record.

    `trained`: in steps, and not held up; `waited`: for transfers; `held_up`: by dsx otherwise, in
    copies and outer steps; `stood`: between steps, as it does where it was lost or not started.
    """

    cluster: int
    steps: int
    whole: float
    trained: float
    waited: float
    held_up: float
    stood: float
    tokens_per_second: float | None
    last_loss: float | None


@dataclass(frozen=True)
class RunNumbers:
    """A run's; `state` is what its live page shows (watch/state.py)."""

    run: WatchedRun
    name: str
    state: dict[str, Any]
    clusters: list[ClusterTime]
    settings: Record
    summary: Record
    alarms: dict[str, int] = field(default_factory=dict[str, int])
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    memory: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])

    @property
    def slowest(self) -> ClusterTime:
        """The cluster whose steps took longest, which the others wait for."""
        return max(self.clusters, key=lambda one: one.whole - one.stood)

    @property
    def last_loss(self) -> float | None:
        """The mean of the clusters' last losses."""
        losses = [one.last_loss for one in self.clusters if one.last_loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def utilization(self) -> float | None:
        """The share of the steps' time in which dsx did not hold training up, of all clusters."""
        taken = sum(one.trained + one.waited + one.held_up for one in self.clusters)
        return sum(one.trained for one in self.clusters) / taken if taken else None


def numbers_of(run: WatchedRun, summary: Record) -> RunNumbers:
    """Return a run's numbers; ValueError where it has not taken a step."""
    while run.poll():
        pass
    clusters = [cluster for cluster in run.clusters if len(cluster.steps)]
    if not clusters:
        if run.trouble:
            raise ValueError(f"{run.folder} holds no inner steps that can be read: {run.trouble}")
        raise ValueError(f"{run.folder} holds no records of inner steps yet: wait for the first")
    last = max(cluster.last_time for cluster in clusters)
    starts = [about["starts"][-1] for _, about in sorted(run.abouts.items())]
    config: Record = (starts[0].get("config") or {}) if starts else {}
    alarms: dict[str, int] = {}
    for cluster in clusters:
        for kind, count in cluster.alarms.items():
            alarms[kind] = max(count, alarms.get(kind, 0))
    return RunNumbers(
        run=run,
        name=run.folder.resolve().name,
        state=state(run, last),
        clusters=[_time_of(cluster) for cluster in clusters],
        settings=config.get("resolved") or clusters[0].start.get("axes") or {},
        summary=sound_summary(summary),
        alarms=alarms,
        left_out={name: max(c.left_out[name] for c in clusters) for name in LEFT_OUT},
        memory={c.cluster: _most_held(c) for c in clusters if c.looks},
    )


def _most_held(cluster: WatchedCluster) -> dict[str, float]:
    """Return what its first rank has held at most, under the names of its records, and its plan."""
    rows = cluster.machine.read()
    names = ("process_bytes", "device_bytes", "outer_bytes")
    found = {name: float(rows[name].max()) for name in names if cluster.machine.is_known(name)}
    planned = cluster.looks[-1].get("outer_planned_bytes")
    return found if planned is None else {**found, "outer_planned_bytes": float(planned)}


def _time_of(cluster: WatchedCluster) -> ClusterTime:
    rows, syncs = cluster.steps.read(), cluster.syncs.read()
    taken = _sum(rows["seconds"])
    blocked = min(_sum(rows["blocked"]), taken)
    waited = min(_sum(syncs["wait_seconds"]), blocked)
    first = float(rows["time"][0]) - _sum(rows["seconds"][:1])  # a row's time is that of its end
    whole = max(float(rows["time"][-1]) - first, taken)
    tokens = _sum(rows["trained"])
    losses = cluster.losses.read()["value"][-_LAST_LOSSES:]
    return ClusterTime(
        cluster=cluster.cluster,
        steps=int(rows["step"][-1]),
        whole=whole,
        trained=taken - blocked,
        waited=waited,
        held_up=blocked - waited,
        stood=whole - taken,
        tokens_per_second=tokens / taken if tokens and taken else None,
        last_loss=float(losses.mean()) if len(losses) else None,
    )


def _sum(column: Any) -> float:
    known = column[~_is_nan(column)]
    return float(known.sum())


def _is_nan(column: Any) -> Any:
    return column != column


def is_finite(value: float | None) -> bool:
    """Whether there is a number."""
    return value is not None and math.isfinite(value)
