"""Saves that are written while training goes on: whole or not there, and gone on from."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint import snapshot
from dsx.checkpoint.tags import complete_tags
from tests.distributed import run_distributed
from tests.engines.engines import build_engine, ds_config, quiet, train_step
from tests.installed import needs

pytestmark = [needs("deepspeed"), pytest.mark.ci]
KIND = (1, "fp32", "one", "adamw", "streaming_diloco")
LAST = 14


def new_engine(base: str) -> Any:
    config = ds_config(1, "fp32", "streaming_diloco")["dsx"]
    config |= {"checkpoints": {"beside_training": True}, "metrics": {"dir": f"{base}/run"}}
    return build_engine(KIND, dsx=config)


def trained(engine: Any) -> list[Any]:
    return [p.detach().float().numpy().copy() for p in engine.module.parameters()]


def save_beside(base: str) -> dict[str, Any]:
    """Save at steps 3, 6 and 9 to a slow disk, at 9 one rank cannot; go on from what was saved."""
    quiet()
    engine = new_engine(base)
    handle, own = engine.dsx, Path(base) / f"cluster_{engine.dsx.cluster_id}"
    write_all, told, early = snapshot._write_all, list[str](), list[bool]()
    handle._records._outlets.not_saved = told.append
    is_bad = handle.cluster_id == 1 and engine.global_rank == 1

    def write_slowly(descriptor: int, chunk: Any) -> None:
        time.sleep(0.05)
        if is_bad and "step9" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        write_all(descriptor, chunk)

    snapshot._write_all = write_slowly
    for step in range(1, LAST + 1):
        train_step(engine, step)
        if step in (3, 6, 9, 12):
            assert engine.save_checkpoint(base, tag=f"step{step}")
            early.append(f"step{step}" in complete_tags(own))
    handle.finish()
    whole = trained(engine)
    snapshot._write_all = write_all
    there = sorted(complete_tags(own))
    left = sorted(path.name for path in own.glob("*.unfinished"))
    resumed = []
    handle.gather(None)
    for tag in ("step6", "step12"):
        engine.load_checkpoint(base, tag=tag)
        for step in range(handle.step + 1, LAST + 1):
            train_step(engine, step)
        handle.finish()
        resumed.append(all((a == b).all() for a, b in zip(trained(engine), whole, strict=True)))
    handle.close()
    return {"told": told, "early": early, "there": there, "left": left, "resumed": resumed}


def test_a_save_beside_training_is_whole_or_not_there(tmp_path: Path) -> None:
    results = run_distributed(save_beside, 4, str(tmp_path), timeout_seconds=240)
    for rank, result in enumerate(results):
        assert not any(result["early"]) and result["left"] == []
        assert result["resumed"] == [True, True]
        kept = ["step12", "step3", "step6"]
        assert result["there"] == (sorted([*kept, "step9"]) if rank < 2 else kept)
        assert len(result["told"]) == (rank >= 2)
    assert results[2]["told"] == results[3]["told"]
    (told,) = results[2]["told"]
    assert "cluster_1/step9 is not saved: rank 1: Input/output error" in told
