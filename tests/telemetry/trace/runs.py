"""Traced runs of the tiny model: two gloo clusters of one rank, plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import dsx
from dsx.comm.world import current_world
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


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
