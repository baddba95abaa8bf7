"""What the page shows beside its charts: how the run is, as an object that is sent when it changes.

What the records do not have is not in it: the page leaves that out.
"""

from __future__ import annotations

import math
from typing import Any

from dsx.telemetry.in_words import said_of_heal, said_of_setup
from dsx.telemetry.run_folder import Record
from dsx.telemetry.sound import seconds_of
from dsx.telemetry.watch.charts import CHARTS, axes_of, has_chart
from dsx.telemetry.watch.cluster import LEFT_OUT, WatchedCluster
from dsx.telemetry.watch.machine import links, measured_line, memory, slowest
from dsx.telemetry.watch.members import last_membership, members, num_clusters
from dsx.telemetry.watch.run import WatchedRun

_MOST_EVENTS = 100
_MOST_CHECKPOINTS = 6
_RECENT = 50  # transfers, of which it is said how much was hidden
_GOES_ON = ("trains", "silent", "heals")


def state(run: WatchedRun, now: float) -> dict[str, Any]:
    """Return the state of a run; `now` in seconds since 1970. Takes its lock."""
    with run.lock:
        rows = members(run, now)
        clusters = [cluster for cluster in run.clusters if cluster.has_records]
        found: dict[str, Any] = {
            "version": run.version, "now": now, "run": run.folder.resolve().name,
            "folder": str(run.folder), "read_share": run.read_share, "members": rows,
            "num_clusters": num_clusters(run), "trouble": _trouble(run),
            "other_runs": run.other_runs, "newer": run.newer and str(run.newer),
            **_what_runs(run),
        }  # fmt: skip
        found |= _progress(clusters, rows)
        all_links = links(clusters)
        found |= {
            "phase": _phase(rows),
            "validation": _validation(run, clusters),
            "traffic": _traffic(clusters),
            "memory": memory(clusters),
            "links": slowest(all_links),
            "num_links": len(all_links),
            "parity": _parity(clusters),
            "guard": _guard(clusters),
            "checkpoints": _checkpoints(run),
            "events": _events(run),
            "charts": [
                {"key": chart.key, "title": chart.title, "unit": chart.unit}
                for chart in CHARTS
                if has_chart(chart, clusters)
            ],
            "axes": axes_of(clusters),
        }
        return found


def _trouble(run: WatchedRun) -> str:
    """Return what could not be read, with how much of it."""
    count = sum(cluster.num_unreadable for cluster in run.clusters)
    what = "line was no record" if count == 1 else "lines were no records"
    return "; ".join(filter(None, [run.trouble, f"{count} {what} of dsx" if count else ""]))


def _what_runs(run: WatchedRun) -> dict[str, Any]:
    """Return the preset, what stands beside it, when it all began; and `what`, in words."""
    if not run.abouts:
        return {}
    starts = next(iter(run.abouts.values()))["starts"]
    settings: Record = (starts[-1].get("config") or {}).get("resolved") or {}
    limit = line_limit(run)
    found = {
        "preset": settings.get("preset"), "begun": starts[0]["time"], "num_starts": len(starts),
        "ranks": starts[-1].get("ranks"), "device": starts[-1].get("device"),
        "line_limit_mbit": limit / 125_000 if limit else None,
    }  # fmt: skip
    found = {name: value for name, value in found.items() if value is not None}
    what = said_of_setup({**found, "num_clusters": num_clusters(run)}, settings)
    return {**found, "what": " ".join(what)}


def line_limit(run: WatchedRun) -> float | None:
    """Return the bytes per second that a cluster may send, None where that is not limited."""
    for about in run.abouts.values():
        settings: Record = (about["starts"][-1].get("config") or {}).get("resolved") or {}
        rate = (settings.get("link") or {}).get("rate_mbit")
        return 125_000.0 * rate if rate else None
    return None


def line_levels(run: WatchedRun) -> dict[str, float]:
    """Return what bounds the line, in bytes per second, by the names that its chart has."""
    told = {"limit": line_limit(run), "measured": measured_line(run.clusters)}
    return {name: level for name, level in told.items() if level is not None}


def _progress(clusters: list[WatchedCluster], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return where the run is, how fast, and how long it takes."""
    found: dict[str, Any] = {}
    if not clusters:
        return found
    found["step"] = max(row.get("step", 0) for row in rows)
    tokens = [cluster.steps.read()["tokens"] for cluster in clusters]
    told = [float(column[-1]) for column in tokens if len(column) and not math.isnan(column[-1])]
    if told:
        found["tokens"] = sum(told)
    going = [row for row in rows if row["state"] in _GOES_ON]
    for name in ("tokens_per_second", "steps_per_second", "utilization", "loss"):
        values = [row[name] for row in going or rows if row.get(name) is not None]
        values = [value for value in values if math.isfinite(value)]
        if values and name == "tokens_per_second":
            found[name] = sum(values)
        elif values:
            found[name] = min(values) if name == "steps_per_second" else sum(values) / len(values)
    totals = [cluster.planned_steps for cluster in clusters if cluster.planned_steps]
    if totals:
        found["planned_steps"] = max(totals)
        if going and found.get("steps_per_second"):
            left = max(found["planned_steps"] - found["step"], 0)
            found["eta_seconds"] = left / found["steps_per_second"]
    return found


def _phase(rows: list[dict[str, Any]]) -> str:
    """Return `waiting`, `training`, `silent`, `finished` or `stopped`."""
    states = {row["state"] for row in rows} - {"unseen"}
    if not states:
        return "waiting"
    if states & {"trains", "heals"}:
        return "training"
    if "silent" in states:
        return "silent"
    whys = {row.get("why", "") for row in rows if row["state"] == "ended"}
    return "finished" if any(why.startswith("finished") for why in whys) else "stopped"


def _validation(run: WatchedRun, clusters: list[WatchedCluster]) -> dict[str, Any]:
    """Return the last loss on data that is not trained on, and whose: the script's word counts."""
    average = run.summary.get("val_loss_average")
    if isinstance(average, float):
        return {"loss": average, "of": "the average, at the end"}
    last = [c.validation.read()["value"][-1] for c in clusters if len(c.validation)]
    return {"loss": float(sum(last) / len(last)), "of": "mean of the clusters"} if last else {}


def _traffic(clusters: list[WatchedCluster]) -> dict[str, Any]:
    """Return what one cluster sent, what data parallel training would have, and what was hidden.

    That is a ring all-reduce of all elements in fp32 at every step. `line` is what transfers carry
    while they are under way, and `measured` what the line gave before, in bytes per second.
    """
    found: dict[str, Any] = {}
    for cluster in clusters:
        told = float(cluster.finish.get("bytes_sent") or cluster.last_step.get("bytes_sent") or 0)
        if told <= found.get("sent", 0):
            continue
        found["sent"] = told
        count = cluster.start.get("num_clusters")
        if count and cluster.has_had_all and all(cluster.fragments.values()):
            a_step = 4 * sum(cluster.fragments.values()) * 2 * (count - 1) / count
            found["data_parallel"] = a_step * float(cluster.last_step.get("step", 0))
    recent = [cluster.syncs.read() for cluster in clusters]
    waited, taken = (
        sum(float(rows[name][-_RECENT:].sum()) for rows in recent)
        for name in ("wait_seconds", "transfer_seconds")
    )
    if taken > 0:
        found["hidden"] = max(1 - waited / taken, 0.0)
        sent = sum(float(rows["bytes_sent"][-_RECENT:].sum()) for rows in recent)
        found["line"] = sent / taken
    measured = measured_line(clusters)
    return found if measured is None else {**found, "measured": measured}


def _parity(clusters: list[WatchedCluster]) -> dict[str, Any]:
    """Return in how many rounds clusters did not agree, and the last that they did."""
    if not any(cluster.num_syncs for cluster in clusters):
        return {}
    found: dict[str, Any] = {
        name: max(cluster.left_out[name] for cluster in clusters) for name in LEFT_OUT
    }
    last = max((c.last_sync for c in clusters if c.last_sync), key=lambda s: s["applied_step"])
    found["checked"] = {"round": last.get("round"), "step": last["applied_step"]}
    bad = max(
        (c.last_left_out for c in clusters if c.last_left_out), key=lambda s: s["time"], default={}
    )
    if bad:
        found["last"] = {
            "step": bad["applied_step"], "fragment": bad["fragment"],
            **{name: bad[name] for name in LEFT_OUT if bad.get(name)},
        }  # fmt: skip
    return found


def _guard(clusters: list[WatchedCluster]) -> dict[str, Any]:
    """Return the guard's last figures, how often it has warned, and its steps down."""
    for cluster in clusters:
        names = ("autocorrelation", "cluster_cosine", "norm_ratio", "effective_gain")
        figures = {name: cluster.last_sync[name] for name in names if name in cluster.last_sync}
        if figures or cluster.alarms:
            return {**figures, "alarms": cluster.alarms, "rungs": cluster.rungs}
    return {}


def _checkpoints(run: WatchedRun) -> dict[str, Any]:
    """Return the last checkpoints, and the last step that all clusters have one of."""
    by_step: dict[int, dict[str, Any]] = {}
    writers = [m for m in sorted(run.abouts) if m not in run.other_runs]
    for cluster in writers:
        for entry in run.abouts[cluster].get("checkpoints", ()):
            row = by_step.setdefault(
                int(entry["step"]),
                {"step": int(entry["step"]), "clusters": [], "tag": entry["tag"]},
            )
            row["clusters"].append(cluster)
            if entry.get("copied_to"):
                row.setdefault("copied", []).append(cluster)
                row["copied_to"] = entry["copied_to"]
            row["time"] = seconds_of(entry["time"])
            row["is_there"] = row.get("is_there", True) and (run.folder / entry["path"]).is_dir()
    rows = [by_step[step] for step in sorted(by_step, reverse=True)]
    found: dict[str, Any] = {"rows": rows[:_MOST_CHECKPOINTS], "count": len(rows)}
    common = [row["step"] for row in rows if row["clusters"] == writers]
    if common:
        found["common_step"] = common[0]
    return found if rows else {}


def _events(run: WatchedRun) -> list[dict[str, Any]]:
    """Return what has happened, the last first."""
    found: list[dict[str, Any]] = [
        {"time": line.when, "cluster": line.cluster, "level": line.level, "text": line.text}
        for line in run.log_lines
    ]
    for cluster, about in run.abouts.items():
        for start in about["starts"]:
            text = f"started at step {start.get('step', 0)}"
            if start.get("resumed_from"):
                text += f", from {start['resumed_from']}"
            if start.get("rolled_back"):
                text = f"went back to step {start['step']}: {start['rolled_back']['why']}"
            found.append(_event(start["time"], cluster, text))
            if start.get("end"):
                end = start["end"]
                found.append(_event(end["time"], cluster, f"{end['how']} at step {end['step']}"))
    told = last_membership(run.clusters)
    for speaker in [c for c in run.clusters if told and c.members[-1:] == [told]][:1]:
        for record in speaker.members:
            named = ", ".join(map(str, record["members"]))
            text = f"from step {record['step']} on, clusters {named} train"
            found.append({"time": record["time"], "cluster": speaker.cluster, "level": "info",
                          "text": text})  # fmt: skip
    for cluster in run.clusters:
        told = [(record, _said_of(record)) for record in cluster.events]
        found += [
            {"time": record["time"], "cluster": cluster.cluster, "level": "info", "text": text}
            for record, text in told if text
        ]  # fmt: skip
    found.sort(key=lambda event: event["time"], reverse=True)
    return found[:_MOST_EVENTS]


def _said_of(record: Record) -> str:
    """Return an order, or a heal, in words; empty for what its start tells already."""
    if record["kind"] == "order":
        return f"{record.get('do')} at step {record.get('step')}, asked by {record.get('by')}"
    return said_of_heal(record) if record["kind"] == "healed" else ""


def _event(when: str, cluster: int, text: str) -> dict[str, Any]:
    return {"time": seconds_of(when), "cluster": cluster, "level": "info", "text": text}
