"""Plain PyTorch by TorchCheckpoints: written beside training, whole or not there, and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dsx
from dsx.checkpoint.remote import Remote
from dsx.checkpoint.tags import complete_tags
from dsx.comm.world import current_world
from tests.distributed import run_distributed
from tests.engines.resumes import Net
from tests.engines.torch_ranks import CLUSTERS, LAST, RANKS, Kind, Run, config_of, wrap
from tests.installed import needs

pytestmark = pytest.mark.ci
MUON = "muon" if hasattr(torch.optim, "Muon") else "adamw"
KINDS = [Kind("fsdp", "streaming"), Kind("ddp", "streaming", MUON)]


class Saves(Run):
    """A run that saves by TorchCheckpoints, with settings of its own."""

    def __init__(self, kind: Kind, base: Path, seed: int = 0, **checkpoints: Any) -> None:
        block = config_of(kind.method)["dsx"]
        block |= {"checkpoints": checkpoints, "metrics": {"dir": f"{base}/run"}}
        super().__init__(kind, seed, {"dsx": block})
        self.checkpoints = dsx.TorchCheckpoints(self.handle)


def full_disk(tag: str, is_bad: bool) -> Any:
    """Let a rank's files of one tag not be written; return what was there."""
    before = FileSystem.create_stream

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        if is_bad and mode == "wb" and tag in str(path):
            raise OSError(28, "No space left on device", str(path))
        return before(self, path, mode)

    FileSystem.create_stream = create_stream
    return before


def save_and_go_on(kind: Kind, base: Path) -> dict[str, Any]:
    """Save at 3, 6 and 9, which one rank cannot; then go on with nothing on the disk."""
    near, far = base / "near", {"remote": f"file://{base}/far", "beside_training": True}
    whole = Saves(kind, base, **far)
    handle, world, told = whole.handle, whole.world, list[str]()
    handle._records._outlets.not_saved = told.append
    before = full_disk("step9", world.cluster_id == 1 and world.rank == 1)
    saved = []
    for step in range(1, LAST + 1):
        whole.take_step(step)
        if step in (3, 6, 9):
            saved.append(whole.checkpoints.save(near))
    there = sorted(complete_tags(near / f"cluster_{world.cluster_id}"))
    FileSystem.create_stream = before
    trained = whole.finish()
    world.rendezvous.gather("trained", None)
    if world.rank == 0:
        shutil.rmtree(near / f"cluster_{world.cluster_id}")
    dist.barrier()
    world.rendezvous.gather("gone", None)
    resumed = Saves(kind, base, seed=7, **far)
    path = resumed.checkpoints.load(base / "other")
    assert resumed.handle.step == 6 and path is not None
    for step in range(7, LAST + 1):
        resumed.take_step(step)
    again = resumed.finish()
    equal = all((again.weights[n] == w).all() for n, w in trained.weights.items())
    equal &= all((again.average[n] == w).all() for n, w in trained.average.items())
    left = [p.name for p in base.rglob("*.unfinished")]
    return {"saved": saved, "told": told, "there": there, "equal": equal, "left": left}


def run(base: str) -> list[dict[str, Any]]:
    dsx.init_distributed(config_of("diloco"))
    found = [save_and_go_on(kind, Path(base) / kind.wrap) for kind in KINDS]
    load_without_dsx(Path(base) / KINDS[0].wrap)
    return found


def load_without_dsx(base: Path) -> None:
    """What is saved is torch's own layout: its functions load it into a model and an optimizer."""
    world = current_world()
    assert world is not None
    path = base / "other" / f"cluster_{world.cluster_id}" / "step6" / "torch"
    model = wrap("fsdp", Net(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    weights, moments = get_state_dict(model, optimizer)
    before = {n: w.full_tensor().clone() for n, w in weights.items()}
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    changed = {n: p.full_tensor() for n, p in model.named_parameters()}
    assert all((before[n] != w).any() for n, w in changed.items())
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert {int(kept["step"]) for kept in optimizer.state.values()} == {6}


@needs("fsspec")
def test_a_save_is_whole_or_not_there_and_is_gone_on_from(tmp_path: Path) -> None:
    results = run_distributed(run, RANKS * CLUSTERS, str(tmp_path), timeout_seconds=280)
    for index, kind in enumerate(KINDS):
        assert "step6" in Remote(f"file://{tmp_path}/{kind.wrap}/far", "here").tags(1)
        for rank, result in enumerate(found[index] for found in results):
            is_at_once = kind == KINDS[1]  # not the first handle of its process
            assert result["saved"] == [True, True, not (is_at_once and rank >= RANKS)], kind
            assert result["left"] == []
            assert result["there"][:2] == ["step3", "step6"] and result["equal"], kind
            assert len(result["told"]) == (rank >= RANKS), result["told"]
    for (told,) in (result["told"] for result in results[RANKS]):
        assert "cluster_1/step9 is not saved: rank 1: No space left on device" in told
        assert "/step9.unfinished/torch/__1_0.distcp)" in told and "rank 0" not in told
