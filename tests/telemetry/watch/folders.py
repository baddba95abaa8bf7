"""Folders of runs as clusters write them, made up in no time."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dsx.telemetry.run_folder import cluster_file

BEGUN = 1_760_000_000.0


def say_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def about(cluster: int, num_clusters: int = 2, **more: Any) -> dict[str, Any]:
    """Return what a run.json says of a run under way; `more` of its start."""
    start = {
        "time": say_time(BEGUN), "step": 0, "resumed_from": None, "resumed_session": None,
        "end": None, "session": "made-up", "host": socket.gethostname(), "pid": os.getpid(),
        "num_clusters": num_clusters, "ranks": 1, "device": "cpu",
        "config": {"resolved": {"preset": "diloco", "link": {"rate_mbit": 100}}}, **more,
    }  # fmt: skip
    return {"format": 1, "cluster": cluster, "files": {}, "starts": [start], "checkpoints": []}


def write_about(folder: Path, cluster: int, told: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = cluster_file(folder, "run", ".json", cluster)
    path.with_suffix(".tmp").write_text(json.dumps(told))
    path.with_suffix(".tmp").replace(path)


def start_record(cluster: int, num_clusters: int = 2) -> dict[str, Any]:
    return {"cluster": cluster, "time": BEGUN, "kind": "start", "step": 0,
            "num_clusters": num_clusters}  # fmt: skip


def step_record(cluster: int, step: int, **more: Any) -> dict[str, Any]:
    loss = 2 + 4 / math.sqrt(step) + 0.01 * cluster + 0.05 * math.sin(7 * step)
    return {
        "cluster": cluster, "time": BEGUN + step, "kind": "step", "step": step, "seconds": 1.0,
        "blocked_seconds": 0.1, "utilization": 0.9, "bytes_sent": 1000 * (step // 8),
        "skipped_steps": 0, "loss": loss, "tokens": 512, **more,
    }  # fmt: skip


def sync_record(cluster: int, launched: int, applied: int, **more: Any) -> dict[str, Any]:
    return {
        "cluster": cluster, "time": BEGUN + applied + 0.01, "kind": "sync",
        "fragment": launched // 4 % 2, "numel": 500, "round": launched // 8, "interval": 8,
        "launched_step": launched, "applied_step": applied, "bytes_sent": 500,
        "wait_seconds": 0.5, "transfer_seconds": 2.0, "coding_seconds": 0.1,
        "commit_seconds": 0.01, "pseudo_gradient_norm": 1.0 + 0.1 * cluster, "mean_norm": 0.9,
        **more,
    }  # fmt: skip


def of(cluster: int, kind: str, step: int, **more: Any) -> dict[str, Any]:
    """Return a record of another kind, written at the end of a step."""
    return {"cluster": cluster, "time": BEGUN + step, "kind": kind, "step": step, **more}


def link(to: int, sent: int, received: int, seconds: float) -> dict[str, Any]:
    """Return what a record of the machine says of a link."""
    return {"to": to, "sent_bytes": sent, "received_bytes": received,
            "round_trip_seconds": seconds, "least_seconds": 0.01}  # fmt: skip


def machine(cluster: int, step: int, **more: Any) -> dict[str, Any]:
    """Return what a process holds, of which the outer state is as planned."""
    held = {"process_bytes": 400_000_000 + step, "outer_bytes": 5000, "outer_planned_bytes": 5000}
    return of(cluster, "machine", step, **{**held, **more})


def healed(cluster: int, step: int) -> dict[str, Any]:
    """Return the record of a cluster that has come to the others."""
    return of(cluster, "healed", step, seconds=2.5, copied_bytes=9_000_000,
              held_bytes=3_000_000, results_bytes=1_000_000)  # fmt: skip


def records(cluster: int, steps: int, first: int = 1) -> Iterator[dict[str, Any]]:
    """Yield what a cluster writes from its first step on."""
    if first == 1:
        yield start_record(cluster)
    for step in range(first, steps + 1):
        yield step_record(cluster, step)
        if step % 4 == 0 and step >= 8:
            yield sync_record(cluster, step - 3 if step % 8 else step - 4, step)


def append(folder: Path, cluster: int, *written: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with cluster_file(folder, "metrics", ".jsonl", cluster).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in written)


def make_run(folder: Path, clusters: int = 2, steps: int = 40) -> Path:
    for cluster in range(clusters):
        write_about(folder, cluster, about(cluster, clusters))
        append(folder, cluster, *records(cluster, steps))
    return folder
