"""Saves of one name, where one cluster's cannot be written: what both hold of it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.checkpoint.tags import complete_tags
from dsx.comm.world import current_world
from tests.distributed import run_distributed
from tests.engines.test_torch_checkpoints import full_disk
from tests.telemetry.trace.runs import block
from tests.tiny import TinyNet, batch

SAVED = (4, 8, 12, 16, 20)


def train(base: str, name: str) -> tuple[Any, Any, Any]:
    config = block("diloco", dir=f"{base}/{name}")
    world = current_world() or dsx.init_distributed(config)
    model = TinyNet(world.cluster_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)

    def take_step(step: int) -> None:
        optimizer.zero_grad()
        model(*batch(world.cluster_id, step)).backward()
        optimizer.step()

    return handle, dsx.TorchCheckpoints(handle), take_step


def save_where_a_disk_fails(base: str) -> dict[str, Any]:
    handle, checkpoints, take_step = train(base, "first")
    cluster, saved = handle.cluster_id, list[bool]()
    for step in range(1, SAVED[-1] + 1):
        take_step(step)
        if step in SAVED:
            full_disk("last", cluster == 1 and step > SAVED[1])
            saved.append(checkpoints.save(base, tag="last"))
    there = {tag: m["step"] for tag, m in complete_tags(Path(base) / f"cluster_{cluster}").items()}
    handle.close()  # it is killed, say
    handle, checkpoints, take_step = train(base, "second")
    checkpoints.load(base, tag="last")
    return {"saved": saved, "there": there, "step": handle.step}


@pytest.mark.ci
def test_what_both_clusters_hold_of_a_name_stays_while_one_cannot_save(tmp_path: Path) -> None:
    """With no setting at all: nobody asked for older ones to be deleted, or copied."""
    good, bad = run_distributed(save_where_a_disk_fails, 2, str(tmp_path))
    assert good["saved"] == [True] * 5 and bad["saved"] == [True, True, False, False, False]
    assert good["there"] == {"last": 20, "last.replaced": 16, "last.held.replaced": 8}
    assert bad["there"] == {"last": 8, "last.replaced": 4}
    assert good["step"] == bad["step"] == 8
