"""Each fragment's way in time: trained on, sent, on the line, there, applied.

A transfer was launched at the end of one inner step and applied at the end of another, whose times
the records of steps have; when it came is the launch and the seconds that it took. One that has not
ended is known by the record of its launch.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from dsx.telemetry.watch.cluster import LEFT_OUT, WatchedCluster

_ROUNDS = 4  # that are in view, at first
_LEAST_SECONDS = 20.0
_MOST_LANES = 64
_USUAL_STEPS = 20  # of which it is said how long one takes

Bars = dict[tuple[int, int], list[dict[str, Any]]]  # by stage and fragment


def lanes(cluster: WatchedCluster, seconds: float | None = None) -> dict[str, Any]:
    """Return `span`, the last `seconds` up to the last record, and `lanes`, one of each fragment.

    A lane has bars: `launched`, `arrived` and `applied` in seconds since 1970, and `waited` seconds
    before that; the last two are None of one that has not come, or has not been applied. With
    `is_ahead` no step has been taken since its launch. `stepped` is when the last step ended, and
    `step_seconds` what one takes. For `seconds` None stands for as long as a few rounds take.
    """
    found = _ended(cluster)
    stepped = max((when for _, when, _ in cluster.ends), default=0.0)
    begun = [bar["launched"] for bars in _add_open(cluster, found).values() for bar in bars]
    last = max([stepped, *begun])
    begin = last - (_usual_seconds(found) if seconds is None else seconds)
    rows = [
        {"stage": stage, "fragment": fragment, "bars": _in_view(bars, begin)}
        for (stage, fragment), bars in sorted(found.items())[:_MOST_LANES]
    ]
    taken = [seconds for _, _, seconds in [*cluster.ends][-_USUAL_STEPS:] if seconds == seconds]
    return {
        "cluster": cluster.cluster, "span": [begin, last], "lanes": rows, "stepped": stepped,
        "step_seconds": median(taken) if taken else 0.0,
    }  # fmt: skip


def _add_open(cluster: WatchedCluster, found: Bars) -> Bars:
    """Add a bar for each transfer whose record has not come."""
    last_step = cluster.ends[-1][0] if cluster.ends else 0
    for (stage, fragment, launched_step), one in cluster.open_transfers:
        bar: dict[str, Any] = {
            "launched": one.launched, "arrived": one.arrived or one.applied,
            "applied": one.applied, "waited": 0.0, "launched_step": launched_step,
        }  # fmt: skip
        if launched_step > last_step:
            bar["is_ahead"] = True
        found.setdefault((stage, fragment), []).append(bar)
    return found


def _ended(cluster: WatchedCluster) -> Bars:
    """Return the bars of transfers whose records have come."""
    ends = {step: when for step, when, _ in cluster.ends}
    found: Bars = {}
    for sync in cluster.recent:
        launched, applied = ends.get(sync["launched_step"]), ends.get(sync["applied_step"])
        if launched is None or applied is None:
            continue
        place = int(sync.get("stage", 0)), int(sync["fragment"])
        waited = float(sync.get("wait_seconds") or 0.0)
        if sync["launched_step"] == sync["applied_step"]:  # training stood still meanwhile
            launched = applied - max(waited, float(sync.get("transfer_seconds") or 0.0))
        arrived = min(launched + float(sync.get("transfer_seconds") or 0.0), applied)
        bar: dict[str, Any] = {
            "launched": launched, "arrived": arrived, "applied": applied, "waited": waited,
            "round": sync.get("round"), "launched_step": sync["launched_step"],
            "applied_step": sync["applied_step"],
        }  # fmt: skip
        for name in ("bytes_sent", "transfer_seconds", "coding_seconds", "commit_seconds"):
            if sync.get(name) is not None:
                bar[name] = sync[name]
        left_out = [name for name in LEFT_OUT if sync.get(name)]
        if left_out:
            bar["left_out"] = {name: sync[name] for name in left_out}
        found.setdefault(place, []).append(bar)
    return found


def _usual_seconds(found: Bars) -> float:
    """Return how long some rounds take."""
    between = [
        later["launched"] - earlier["launched"]
        for bars in found.values()
        for earlier, later in zip(bars[:-1], bars[1:], strict=True)
    ]
    return max(_LEAST_SECONDS, _ROUNDS * median(between) if between else 0.0)


def _in_view(bars: list[dict[str, Any]], begin: float) -> list[dict[str, Any]]:
    return [bar for bar in bars if (bar["applied"] or begin) >= begin]
