"""How each cluster of a run is: in a word, and in what its records said last.

trains     its records come
silent     none for five steps, and 10 s at least; its process runs, or is on another host
killed     its process, of this host, is gone and has not said that it ends
heals      the others say so, and it has not taken a step since
left out   the others go on without it
ended      it has said how
unseen     the folder has nothing of it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dsx.telemetry.run_folder import Record
from dsx.telemetry.watch.cluster import LEFT_OUT, WatchedCluster
from dsx.telemetry.watch.run import LogLine, WatchedRun

_SILENT_STEPS, _SILENT_SECONDS = 5, 10.0
_WINDOW = 50  # steps that "now" means
_HEALS = re.compile(r"cluster (\d+) is healing: (.*)")
_HEALED = re.compile(r"(.+), step (\d{1,15})$")  # bytes that it has taken, and its step
_COPIED = re.compile(r".+ of .+ copied \((\d{1,3}) %\)")


def members(run: WatchedRun, now: float) -> list[dict[str, Any]]:
    """Return what a table of members has, a row for each cluster of the run. Under its lock."""
    known = {cluster.cluster: cluster for cluster in run.clusters}
    told = last_membership(list(known.values()))
    numbers = range(max([num_clusters(run), *(m + 1 for m in known)]))
    rows = [_member(m, known.get(m), run, told, now) for m in numbers]
    counted = told.get("members", [*numbers])
    steps = [row["step"] for row in rows if row["state"] == "trains"]
    for row in rows:
        if row["state"] == "heals":
            healing = _healing(known[row["cluster"]], run.log_lines)
            row |= _time_left(_catches_up(healing, max(steps, default=None)), rows)
        if any(row["state"] != "unseen" for row in rows):
            row["weight"] = 1 / len(counted) if row["cluster"] in counted else 0.0
        row |= _left_out(row["cluster"], list(known.values()))
    return rows


def num_clusters(run: WatchedRun) -> int:
    """Return how many clusters the run was started for, as far as is known."""
    told = [about["starts"][-1].get("num_clusters") for about in run.abouts.values()]
    told += [cluster.start.get("num_clusters") for cluster in run.clusters]
    return max((int(count) for count in told if count), default=len(run.clusters))


def last_membership(clusters: Sequence[WatchedCluster]) -> Record:
    """Return the last record of who trains; empty where all do since the start."""
    records = [cluster.members[-1] for cluster in clusters if cluster.members]
    return max(records, key=lambda record: record["time"], default={})


def recent(cluster: WatchedCluster) -> dict[str, float]:
    """Return `steps_per_second`, `tokens_per_second` and `utilization` of its last steps."""
    rows = cluster.steps.read()
    last = max(1, _WINDOW // cluster.steps.records_per_row)
    sums = {name: float(rows[name][-last:].sum()) for name in ("seconds", "blocked", "trained")}
    found: dict[str, float] = {}
    if sums["seconds"] > 0:
        found["steps_per_second"] = float(rows["count"][-last:].sum()) / sums["seconds"]
        found["tokens_per_second"] = sums["trained"] / sums["seconds"]
        found["utilization"] = 1 - sums["blocked"] / sums["seconds"]
    return {name: value for name, value in found.items() if value == value}


def _member(
    number: int, cluster: WatchedCluster | None, run: WatchedRun, told: Record, now: float
) -> dict[str, Any]:
    about = run.abouts.get(number, {})
    start: Record = about["starts"][-1] if about else {}
    row: dict[str, Any] = {"cluster": number}
    if "host" in start:
        row["host"] = str(start["host"])
    if cluster is None or not cluster.has_records:
        return {**row, "state": "unseen", "why": "its records are not in this folder (yet)"}
    row |= {"last_word": cluster.last_time, **recent(cluster)}
    row["step"] = int(cluster.last_step.get("step", 0))
    for name in ("loss", "skipped_steps"):
        if cluster.last_step.get(name) is not None:
            row[name] = cluster.last_step[name]
    if cluster.last_sync:
        row["interval"] = cluster.last_sync.get("interval")
        row["delay"] = cluster.last_sync["applied_step"] - cluster.last_sync["launched_step"]
    sent = float(cluster.finish.get("bytes_sent") or cluster.last_step.get("bytes_sent") or 0)
    row |= {"sent": sent, "syncs": cluster.num_syncs}
    return {**row, **_state(cluster, start, told, run, now)}


def _time_left(healing: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row's `healing`, with `seconds_left` where it comes nearer to those that train."""
    if not healing:
        return {}
    paces = [row.get("steps_per_second", 0.0) for row in rows if row["state"] == "trains"]
    nearer = healing.get("steps_per_second", 0.0) - max(paces, default=0.0)
    if nearer > 0:
        healing["seconds_left"] = max(healing["target"] - healing["step"], 0) / nearer
    return {"healing": healing}


def _left_out(number: int, clusters: Sequence[WatchedCluster]) -> dict[str, Any]:
    """Return the rounds that were left out for one cluster's sake, by reason, where there are."""
    found = {name: max((c.left_out_by[name, number] for c in clusters), default=0)
             for name in LEFT_OUT}  # fmt: skip
    found = {name: count for name, count in found.items() if count}
    return {"left_out": found} if found else {}


def _state(
    cluster: WatchedCluster, start: Record, told: Record, run: WatchedRun, now: float
) -> dict[str, str]:
    """Return `state`, and `why` where there is more to say."""
    end = start.get("end")
    if end:
        return {"state": "ended", "why": f"{end['how']} at step {end['step']}"}
    heals = _healing(cluster, run.log_lines)
    if heals:
        return {"state": "heals", "why": heals[0].text}
    is_out = told and cluster.cluster not in told["members"]
    goes_on = ""
    if is_out and told["time"] > cluster.last_time - 1:
        goes_on = f"the others go on without it from step {told['step']} on"
    if cluster.cluster in run.processes.gone:
        why = [f"process {start['pid']} of this host is gone", *filter(None, [goes_on])]
        return {"state": "killed", "why": "; ".join(why)}
    if goes_on:
        return {"state": "left out", "why": goes_on}
    pace = recent(cluster).get("steps_per_second", 0.0)
    limit = max(_SILENT_SECONDS, _SILENT_STEPS / pace if pace else 0.0)
    if now - cluster.last_time > limit:
        return {"state": "silent", "why": _why_silent(cluster, now)}
    return {"state": "trains"}


def _why_silent(cluster: WatchedCluster, now: float) -> str:
    """Return that nothing comes, and what has been on the line for longest, if anything is."""
    why = "no record for longer than five of its steps"
    for (_, fragment, step), one in cluster.open_transfers:
        if one.arrived is None and one.applied is None:
            seconds = max(now - one.launched, 0.0)
            return (
                f"{why}; fragment {fragment}, sent at step {step}, is on the line ({seconds:.0f} s)"
            )
    return why


def _healing(cluster: WatchedCluster, lines: Sequence[LogLine]) -> list[LogLine]:
    """Return how far a cluster's healing has come, as the others have said it, the last first."""
    found: list[LogLine] = []
    for line in reversed(lines):
        if line.when < cluster.last_time - 1:
            break
        match = _HEALS.match(line.text)
        if match and int(match[1]) == cluster.cluster:
            found.append(replace(line, text=match[2]))
    return found


def _catches_up(said: Sequence[LogLine], target: int | None) -> dict[str, Any]:
    """Return where healing is: `step`, the others' `target`, and `steps_per_second` if known."""
    places = [(line.when, int(match[2])) for line in said if (match := _HEALED.match(line.text))]
    if not places or target is None:
        return {}
    found: dict[str, Any] = {"step": places[0][1], "target": target}
    if match := _COPIED.match(said[0].text):
        return {**found, "copied": min(int(match[1]), 100) / 100}
    seconds, steps = places[0][0] - places[-1][0], places[0][1] - places[-1][1]
    if seconds >= 1 and steps > 0:
        found["steps_per_second"] = steps / seconds
    return found
