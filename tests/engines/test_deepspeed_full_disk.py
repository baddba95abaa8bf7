"""A checkpoint that does not fit on one cluster's disk, and keeping the last few of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.engines.engines import build_engine, ds_config, quiet, train_step
from tests.installed import needs
from tests.telemetry.test_disks_that_fail import disk_of, fill

pytestmark = [needs("deepspeed"), pytest.mark.ci]
KIND = (1, "fp32", "one", "adamw", "diloco")


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """Of which cluster 1's directory is on a disk of 2 MB."""
    with disk_of("2m", tmp_path / "disk") as disk:
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "cluster_1").symlink_to(disk)
        yield tmp_path / "base"


def save_on_a_full_disk(base: str) -> dict[str, Any]:
    quiet()
    engine = build_engine(KIND)
    own = Path(base) / f"cluster_{engine.dsx.cluster_id}"
    saved: list[bool] = []
    told = told_of(engine.dsx)
    for step in range(1, 7):
        train_step(engine, step)
        if step == 3 and engine.dsx.cluster_id == 1 and engine.global_rank == 0:
            fill(own)
        if step == 5 and engine.dsx.cluster_id == 1 and engine.global_rank == 0:
            (own / "other").unlink()
        engine.dsx.gather(None)
        saved.append(engine.save_checkpoint(base, tag=f"step{step}"))
    there = sorted(path.name for path in own.iterdir() if path.suffix != ".py")
    engine.load_checkpoint(base, tag="step2")
    return {"told": told, "saved": saved, "there": there, "step": engine.dsx.step}


def told_of(handle: Any) -> list[str]:
    """Return what people are told of saves that have failed, as it comes."""
    told: list[str] = []
    handle._records._outlets.not_saved = told.append
    return told


def test_training_goes_on_where_a_save_does_not_fit_which_leaves_nothing(base: Path) -> None:
    results = run_distributed(save_on_a_full_disk, 4, str(base), timeout_seconds=240)
    for result in results[:2]:
        assert result["told"] == [] and result["saved"] == [True] * 6
        assert result["there"] == ["latest", *(f"step{n}" for n in range(1, 7))]
    assert results[2] == results[3]
    assert results[2]["saved"] == [True, True, False, False, True, True]
    at_3, at_4 = results[2]["told"]
    assert "cluster_1/step3 is not saved: rank 0: " in at_3 and "step4 is not saved" in at_4
    assert "No space left on device" in at_3 or "file write failed" in at_3
    assert "disk has 0 B free (step2 takes " in at_3 and "free some space" in at_3
    assert results[2]["there"] == ["latest", "step1", "step2", "step5", "step6"]
    assert all(result["step"] == 2 for result in results)


def keep_two(base: str) -> list[list[str]]:
    quiet()
    config = ds_config(1, "fp32", "diloco")
    config["dsx"]["checkpoints"] = {"keep": 2}
    config["dsx"]["metrics"] = {"dir": f"{base}/run"}
    engine = build_engine(KIND, dsx=config["dsx"])
    own = Path(base) / f"cluster_{engine.dsx.cluster_id}"
    seen: list[list[str]] = []
    for step in range(1, 25):
        train_step(engine, step)
        if step % 4 == 0:
            engine.save_checkpoint(base, tag=f"step{step}")
            engine.dsx.gather(None)
            seen.append(sorted(path.name for path in own.iterdir() if path.is_dir()))
    engine.dsx.finish()
    engine.dsx.close()
    seen.append(sorted(path.name for path in own.iterdir() if path.is_dir()))
    return seen


def test_the_last_few_checkpoints_stay(tmp_path: Path) -> None:
    for seen in run_distributed(keep_two, 4, str(tmp_path), timeout_seconds=240):
        assert all(len(names) <= 4 for names in seen)  # one may not be known to all as yet
        assert "step4" not in seen[-1] and {"step20", "step24"} <= set(seen[-1])
        assert not [name for name in seen[-1] if name.endswith((".removed", ".unfinished"))]
