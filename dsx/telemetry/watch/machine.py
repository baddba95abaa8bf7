"""What each cluster's first rank holds against what was planned, and what its links are like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsx.telemetry.run_folder import Record
from dsx.telemetry.watch.cluster import WatchedCluster

_MEMORY = (
    "process_bytes", "outer_bytes", "outer_planned_bytes", "device_bytes", "device_peak_bytes",
    "device_total_bytes",
)  # fmt: skip
_MOST_LINKS = 42  # of seven clusters all; of more, those that a reader has to look at
_LINK = (
    "round_trip_seconds", "least_seconds", "sent_bytes", "received_bytes",
    "measured_bytes_per_second",
)  # fmt: skip


def memory(clusters: Sequence[WatchedCluster]) -> list[dict[str, Any]]:
    """Return a row for each cluster that has told: the last bytes, and `plan`, by purpose."""
    rows: list[dict[str, Any]] = []
    for cluster in clusters:
        if cluster.looks:
            row = {"cluster": cluster.cluster, **_known(cluster.looks[-1], _MEMORY)}
            rows.append(row | {"plan": dict(cluster.start.get("outer_memory") or {})})
    return rows


def links(clusters: Sequence[WatchedCluster]) -> list[dict[str, Any]]:
    """Return a row for each link, from a cluster `of` to another: figures, and rates of late."""
    rows: list[dict[str, Any]] = []
    for cluster in clusters:
        if not cluster.looks:
            continue
        last = cluster.looks[-1]
        looks = [
            (float(last["time"]) - float(look["time"]), {one["to"]: one for one in _links(look)})
            for look in cluster.looks
        ]
        for link in _links(last):
            row = {"of": cluster.cluster, "to": link["to"], **_known(link, _LINK)}
            rows.append(row | _rates(looks, link))
    return rows


def measured_line(clusters: Sequence[WatchedCluster]) -> float | None:
    """Return the bytes per second that `dsx net-test` had of the line; None where none has told.

    Of an all-reduce, which is as fast as its slowest cluster: the least that any has told.
    """
    name = "measured_bytes_per_second"
    told = [float(c.looks[-1][name]) for c in clusters if c.looks and c.looks[-1].get(name)]
    return min(told, default=None)


def slowest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the links as they are, or of many those whose last round trips were the longest."""
    if len(rows) <= _MOST_LINKS:
        return list(rows)
    return sorted(rows, key=lambda row: -row.get("round_trip_seconds", 0.0))[:_MOST_LINKS]


def _links(look: Record) -> Sequence[Record]:
    return look.get("links") or ()


def _rates(looks: Sequence[tuple[float, Mapping[int, Record]]], last: Record) -> dict[str, float]:
    """Return bytes per second since the earliest look of the same process; seconds ago, by `to`."""
    for seconds, links_to in looks:
        link = links_to.get(last["to"])
        if link is not None and seconds > 0:
            moved = {
                name: last[name] - link[name]
                for name in ("sent_bytes", "received_bytes") if name in last and name in link
            }  # fmt: skip
            if all(count >= 0 for count in moved.values()):
                return {f"{name}_per_second": n / seconds for name, n in moved.items()}
    return {}


def _known(record: Record, names: Sequence[str]) -> dict[str, Any]:
    return {name: record[name] for name in names if record.get(name) is not None}
