"""Traced runs of the tiny model: two gloo clusters of one rank, plain PyTorch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch

import dsx
from dsx.comm.world import current_world
from dsx.telemetry.trace.batch import from_line
from dsx.telemetry.trace.files import Wanted, select
from dsx.telemetry.trace.parts import part_path
from dsx.telemetry.trace.picture import Timeline
from tests.tiny import CASES, TinyNet, batch

NUM_STEPS = 13


def block(case: str, **metrics: Any) -> dict[str, Any]:
    return {
        "dsx": {
            "preset": CASES[case].preset,
            "clusters": {"num_clusters": 2, "deadline_seconds": 30},
            **CASES[case].overrides,
            "metrics": metrics,
        }
    }


def train(case: str, first: int = 1, **metrics: Any) -> list[list[float]]:
    """Train one cluster, and return its weights; from step `first` if it resumes there."""
    config = block(case, **metrics)
    world = current_world() or dsx.init_distributed(config)
    model = TinyNet(world.cluster_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)
    for step in range(first, NUM_STEPS + 1):
        optimizer.zero_grad()
        model(*batch(world.cluster_id, step)).backward()
        optimizer.step()
    handle.finish()
    handle.close()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def train_traced_or_not(directory: str) -> dict[str, Any]:
    """Train every case twice, with a trace and without one."""
    results: dict[str, Any] = {}
    for case in ("streaming_diloco", "eager"):
        traced = train(case, dir=f"{directory}/{case}", trace=True)
        plain = train(case, dir=f"{directory}/{case}_off")
        results[case] = (traced, plain)
    return results


def records(path: Path) -> list[dict[str, Any]]:
    """Return the spans of the trace of a rank that `trace_path` names, as they were written."""
    return [
        {
            "name": s.name, "category": s.category, "thread": s.track[2], "start_us": s.start,
            "duration_us": s.end - s.start, "step": s.step, **s.facts,
        }
        for line in gzip_lines(path)
        for s in from_line(line, 0, 0)
    ]  # fmt: skip


def sessions(path: Path) -> list[str]:
    """Return whose its pieces are, in order."""
    return list(dict.fromkeys(json.loads(line)["session"] for line in gzip_lines(path)))


def gzip_lines(path: Path) -> list[bytes]:
    """Return the lines of all parts of a trace, read as any gzip file."""
    number, found = 1, list[bytes]()
    while (part := part_path(path, number)).exists():
        found += gzip.decompress(part.read_bytes()).splitlines()
        number += 1
    return found


def read_timeline(folder: Path, wanted: Wanted | None = None) -> Timeline:
    """Return all that is wanted of a run's trace at once."""
    selection = select(folder, wanted or Wanted())
    spans = [span for rank in selection.ranks for span in selection.spans(rank)]
    spans.sort(key=lambda s: (s.start, -s.end, s.track))
    return Timeline(spans, selection.start, selection.end)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
