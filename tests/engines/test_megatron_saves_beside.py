"""Megatron: outer state written while training goes on, both parts at a remote place, and back."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dsx.checkpoint import snapshot
from dsx.checkpoint.remote import Remote
from dsx.checkpoint.tags import complete_tags
from dsx.engines.megatron_model.dist_checkpoint import TRACKER
from tests.distributed import run_distributed
from tests.engines.megatrons import (
    Engine,
    Kind,
    build_engine,
    build_inner,
    config_of,
    join,
    needs_megatron,
    train_step,
)
from tests.engines.test_megatron_checkpoint import are_equal, having_children, state_of, train
from tests.installed import needs

pytestmark = [needs_megatron, needs("fsspec"), pytest.mark.ci]
KIND = Kind(pipeline=2, is_tied=True)
LAST = 13


def settings(base: Path) -> dict[str, Any]:
    checkpoints = {"beside_training": True, "remote": f"file://{base}/far"}
    return {"checkpoints": checkpoints, "metrics": {"dir": f"{base}/run"}}


def write_slowly(cannot: bool) -> Any:
    write_all = snapshot._write_all

    def write(descriptor: int, chunk: Any) -> None:
        time.sleep(0.05)
        if cannot and "iter_0000009" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        write_all(descriptor, chunk)

    return write


def save(engine: Engine, base: Path, near: Path, iteration: int) -> bool:
    """Save as Megatron with `--async-save`: what names the iteration is written later."""
    from megatron_files import save_checkpoint

    from dsx.engines.megatron.checkpoint import save_outer_state

    is_begun = save_outer_state(engine.handle, iteration, base)
    tracker = near / TRACKER
    before = tracker.read_text() if tracker.is_file() else None
    save_checkpoint(near, iteration, engine.chunks, engine.optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        tracker.unlink()
        if before is not None:
            tracker.write_text(before)
    dist.barrier()
    return is_begun


def train_and_save(base: Path) -> dict[str, Any]:
    """Save at 3, 6 and 9, which the last rank cannot; go on to the end."""
    world = join()
    near = base / "near" / f"megatron_{world.cluster_id}"
    engine = build_engine(KIND, attach={"own_part": near}, **settings(base))
    handle, write_all, told = engine.handle, snapshot._write_all, list[str]()
    handle._records._outlets.not_saved = told.append
    snapshot._write_all = write_slowly(world.cluster_id == 1 and world.rank == 1)
    own = base / "near" / "dsx" / f"cluster_{world.cluster_id}"
    for step in range(1, LAST + 1):
        train_step(engine, step)
        if step in (3, 6, 9):
            assert save(engine, base / "near", near, step)
        if step in (5, 8, 11) and world.rank == 0:  # now Megatron has written its part
            far = base / "far" / f"cluster_{world.cluster_id}" / f"iter_{step - 2:07d}"
            assert not (far / "dsx.json").is_file()
            (near / TRACKER).write_text(f"{step - 2}\n")
    handle.finish()
    whole = state_of(engine)
    there = sorted(complete_tags(own))
    handle.close()
    snapshot._write_all = write_all
    return {"whole": whole, "told": told, "there": there}


def go_on(base: Path) -> dict[str, Any]:
    """Go on with nothing on the disk, from the newest that all clusters have at the remote."""
    import dsx
    from dsx.engines.megatron.resume import newest_iteration

    world = join()
    other = base / "other"
    own = other / f"megatron_{world.cluster_id}"
    block = config_of(KIND, **settings(base))
    checkpoints = dsx.load_config(block).checkpoints
    iteration = newest_iteration(world, checkpoints, other, own)
    from megatron_files import load_checkpoint

    engine = build_inner(KIND, seed=9)
    assert load_checkpoint(own, engine.chunks, engine.optimizer) == iteration
    dsx.attach_megatron(
        engine.chunks, engine.optimizer, config=block, resume=(other, iteration), own_part=own
    )
    train(engine, int(iteration or 0) + 1, LAST)
    engine.handle.finish()
    end = state_of(engine)
    engine.handle.close()
    left = sorted(path.name for path in other.rglob("*") if path.name in ("engine", "x.unfinished"))
    return {"iteration": iteration, "end": end, "left": left}


def run(base: str) -> dict[str, Any]:
    with having_children():
        root = Path(base)
        saved = train_and_save(root)
        dist.barrier()
        world = join()
        world.rendezvous.gather("saved", None)
        if world.rank == 0 and world.cluster_id == 0:
            shutil.rmtree(root / "near")
        world.rendezvous.gather("gone", None)
        resumed = go_on(root)
        return {**saved, **resumed, "equal": are_equal(saved["whole"], resumed["end"])}


def test_a_machine_without_a_disk_goes_on_from_what_was_written_beside(tmp_path: Path) -> None:
    results = run_distributed(run, 4, str(tmp_path), timeout_seconds=280, engine="megatron")
    remote = Remote(f"file://{tmp_path}/far", "here")
    assert all("iter_0000006" in remote.tags(cluster) for cluster in (0, 1))
    assert "iter_0000009" not in remote.tags(1)
    for rank, result in enumerate(results):
        assert result["left"] == []
        kept = ["iter_0000003", "iter_0000006"]
        assert result["there"] == ([*kept, "iter_0000009"] if rank < 2 else kept)
        assert result["iteration"] == 6 and result["equal"]
    assert [len(result["told"]) for result in results] == [0, 0, 1, 1]
    assert "cluster_1/iter_0000009 is not saved: rank 1: No space left" in results[2]["told"][0]
