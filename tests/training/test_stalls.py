"""Every rank of a run that stalls reports itself: who hangs in the engine, and who waits for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import dsx
from dsx.telemetry.stalls import stacks_path, stall_watch
from tests.distributed import run_distributed
from tests.tiny import TinyNet, batch

pytestmark = pytest.mark.ci


def train(run: str) -> list[str]:
    """Cluster 1 hangs in its second step until both have reported; then both train to the end."""
    clusters = {"num_clusters": 2, "deadline_seconds": 600}
    block = {
        "preset": "diloco",
        "clusters": clusters,
        "schedule": {"interval": 2},
        "metrics": {"dir": run},
    }
    world = dsx.init_distributed({"dsx": block})
    model = TinyNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config={"dsx": block})
    files = [stacks_path(Path(run), cluster, 0) for cluster in (0, 1)]
    for step in (1, 2):
        if step == 2:
            stall_watch()._clock = lambda: time.monotonic() + 301
            if world.cluster_id == 1:
                hang_in_the_engine(files)
        optimizer.zero_grad()
        inputs, targets = batch(world.cluster_id, step, 0)
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    handle.finish()
    handle.close()
    return [file.read_text() for file in files]


def hang_in_the_engine(files: list[Path]) -> None:
    wanted = "fragment 0 launched at step 2, cluster 1", "the end of inner step 2"
    while not all(f.exists() and w in f.read_text() for f, w in zip(files, wanted, strict=True)):
        time.sleep(0.05)


def test_both_sides_of_a_stall_report_themselves(tmp_path: Path) -> None:
    waiting, hanging = run_distributed(train, 2, str(tmp_path / "run"))[0]
    assert "MainThread has waited 301" in waiting
    assert "of 600 s for fragment 0 launched at step 2" in waiting
    stack = hanging.partition("thread MainThread\n")[2].partition("\nthread ")[0]
    assert "in hang_in_the_engine" in stack
