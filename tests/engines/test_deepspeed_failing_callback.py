"""A callback that fails on one rank, where the run is told to end, is an error of all its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.engines.engines import build_engine, quiet, train_step
from tests.installed import needs

pytestmark = [needs("deepspeed"), pytest.mark.ci]


def save_with_a_callback(base: str) -> dict[str, Any]:
    quiet()
    engine = build_engine((1, "fp32", "one", "adamw", "diloco"))
    handle, fails, told = engine.dsx, True, ""

    def give(directory: Path) -> dict[str, Any]:
        if fails and handle.cluster_id == 1 and engine.global_rank == 1:
            raise KeyError("epoch")
        return {"epoch": 3}

    handle.on_preemption(give)
    train_step(engine, 1)
    handle.preemption.is_saving = True
    try:
        engine.save_checkpoint(base, tag="told")
    except RuntimeError as error:
        told = str(error)
    fails = False
    there = sorted(path.name for path in (Path(base) / f"cluster_{handle.cluster_id}").iterdir())
    torch.distributed.barrier()  # nobody begins the next one while others look
    engine.save_checkpoint(base, tag="again")
    handle.preemption.is_saving = False
    _, state = engine.load_checkpoint(base, tag="again")
    return {"told": told, "there": there, "epoch": state["epoch"]}


def test_all_ranks_of_the_cluster_have_the_error(tmp_path: Path) -> None:
    results = run_distributed(save_with_a_callback, 4, str(tmp_path), timeout_seconds=120)
    assert [result["epoch"] for result in results] == [3] * 4
    assert [result["told"] for result in results[:2]] == [""] * 2
    assert results[2]["told"] == results[3]["told"] != ""
    assert (
        "cluster_1/told is not saved: what the script saves with it has failed: rank 1: "
        in (results[2]["told"])
    )
    assert "KeyError: 'epoch'" in results[2]["told"] and "told" in results[0]["there"]
    assert all(not result["there"] for result in results[2:])
