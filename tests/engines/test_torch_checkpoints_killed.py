"""Plain PyTorch, killed at any point of a save beside training: goes on from the last good one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystem

import dsx
from dsx.checkpoint import snapshot, tags
from dsx.checkpoint.tags import complete_tags
from tests.distributed import run_distributed
from tests.engines.test_torch_checkpoints import Saves
from tests.engines.torch_ranks import CLUSTERS, LAST, RANKS, Kind, config_of

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]  # six starts of four processes
KIND = Kind("fsdp", "streaming")
POINTS = ["engine's file", "outer state", "manifest", "named"]


def kill(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed(point: str, cluster: int, rank: int) -> None:
    """Let a rank of cluster 1 be killed at a point of the save at step 6."""
    if cluster == 0:
        return
    if point == "engine's file" and rank == 1:
        create_stream = FileSystem.create_stream

        def open_file(self: Any, path: Any, mode: str) -> Any:
            return kill() if "step6" in str(path) else create_stream(self, path, mode)

        FileSystem.create_stream = open_file  # type: ignore[method-assign]
    if point == "outer state" and rank == 1:
        write_all = snapshot._write_all

        def write(descriptor: int, chunk: Any) -> None:
            if "step6" in os.readlink(f"/proc/self/fd/{descriptor}"):
                os.write(descriptor, bytes(chunk)[: len(chunk) // 2])
                kill()
            write_all(descriptor, chunk)

        snapshot._write_all = write
    if point == "manifest" and rank == 0:
        write_durably = tags.write_durably

        def write_manifest(path: Path, text: str) -> None:
            kill() if "step6" in str(path) else write_durably(path, text)

        tags.write_durably = write_manifest
    if point == "named" and rank == 0:
        end_writing = tags.end_writing

        def end(directory: Path) -> None:
            kill() if (directory / "step6").exists() else end_writing(directory)

        tags.end_writing = end


def train(base: str, point: str | None) -> dict[str, Any]:
    """Go on from what there is, to the end or the point."""
    world = dsx.init_distributed(config_of("diloco"))
    seed = 7 if (Path(base) / "cluster_0" / "step3").is_dir() else 0  # what is loaded counts
    run = Saves(KIND, Path(base), seed, beside_training=True)
    begun = 0
    try:
        run.checkpoints.load(base)
        begun = run.handle.step
    except FileNotFoundError:
        pass
    be_killed(point or "", world.cluster_id, world.rank)
    for step in range(begun + 1, LAST + 1):
        run.take_step(step)
        if step in (3, 6, 10):
            run.checkpoints.save(base)
            if step == 3:
                run.checkpoints._handle.beside.wait()  # all of them have this one
    weights = run.finish().weights
    left = [p.name for p in Path(base).rglob("*.unfinished")]
    return {"weights": weights, "begun": begun, "left": left}


def test_killed_at_any_point_of_a_save_a_run_goes_on_exactly(tmp_path: Path) -> None:
    size, whole = RANKS * CLUSTERS, tmp_path / "whole"
    expected = run_distributed(train, size, str(whole), None, timeout_seconds=200)
    base = tmp_path / "killed"
    for point in POINTS:
        with pytest.raises(AssertionError):
            run_distributed(train, size, str(base), point, timeout_seconds=200)
        there = complete_tags(base / "cluster_1")
        assert "step3" in there and ("step6" in there) == (point == "named"), point
    ends = run_distributed(train, size, str(base), None, timeout_seconds=200)
    for end, whole_end in zip(ends, expected, strict=True):
        assert whole_end["begun"] == 0 and end["begun"] in (3, 6) and end["left"] == []
        assert all((end["weights"][n] == w).all() for n, w in whole_end["weights"].items())
