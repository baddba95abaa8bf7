"""`dsx export`: what is written loads into the plain model and is the averaged one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dsx.checkpoint.averaged_model import find_model
from dsx.checkpoint.files import FORMAT
from dsx.checkpoint.tags import Manifest, begin_tag, complete_tag
from dsx.checkpoint.weight_files import write_safetensors
from dsx.cli import app
from dsx.comm.topology import RankInfo
from tests.checkpoint.saved import save_state
from tests.checkpoint.test_reshard import new_tiny, save_all, through_shards
from tests.simulated import Simulated
from tests.tiny import TinyNet, mean_loss


def trained(name: str, num_steps: int) -> Simulated:
    run = new_tiny(name)
    for _ in range(num_steps):
        run.train_step(mean_loss)
    return run


def checkpoint(run: Simulated, base: Path, is_sharded: bool = False) -> Path:
    """Lay a run's state out as `save_checkpoint` does."""
    save_all(run, base / "flat")
    if is_sharded:
        through_shards(run, base / "flat", base / "sharded")
    for m in range(run.num_clusters):
        directory = base / "checkpoints" / f"cluster_{m}"
        directory.mkdir(parents=True)
        (base / ("sharded" if is_sharded else "flat") / f"{m}").rename(directory / "a.unfinished")
        complete_tag(directory, "a", Manifest(FORMAT, run.num_steps, "run", run.num_clusters, 1))
    return base / "checkpoints"


def export(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(
    ("name", "steps"), [("diloco", 8), ("eager", 6), ("streaming_diloco", 6), ("dreamddp", 7)]
)
def test_the_averaged_model(name: str, steps: int, is_sharded: bool, tmp_path: Path) -> None:
    run = trained(name, steps)
    base = checkpoint(
        run, tmp_path, is_sharded=is_sharded and name not in ("dreamddp", "streaming_diloco")
    )
    code, said = export(base, "--out", tmp_path / "out")
    assert code == 0, said
    assert f"at step {steps}, 168 trained elements" in said
    assert ("transfer(s) that were in flight" in said) == (name in ("eager", "streaming_diloco"))
    model = TinyNet(1)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    with run.averaged() as average:
        for ours, theirs in zip(model.parameters(), average.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_run_that_went_on_with_fewer_clusters(tmp_path: Path, caplog: Any) -> None:
    """The newest tag is that of the clusters which wrote it; an incomplete one is passed over."""
    for num_clusters, step in ((3, 4), (2, 9), (2, 12)):
        run = new_tiny("diloco", num_clusters)
        for _ in range(step):
            run.train_step(mean_loss)
        for m, loop in enumerate(run.loops[: 1 if step == 12 else None]):
            here, directory = RankInfo(m, num_clusters, 0, 1), tmp_path / f"cluster_{m}"
            unfinished = begin_tag(directory, f"step{step}")
            save_state(loop, directory / unfinished, here, f"run {step}", {}, {})
            manifest = Manifest(FORMAT, step, f"run {step}", num_clusters, 1)
            complete_tag(directory, f"step{step}", manifest)
    model = find_model(tmp_path, None)
    assert (model.step, model.num_saved_clusters) == (9, 2)
    assert "step12 is not complete in cluster(s) [1]; exporting step9" in caplog.text
    assert find_model(tmp_path, "step4").num_saved_clusters == 3
    with pytest.raises(FileNotFoundError, match="no complete checkpoint 'step12' .*cluster 1: "):
        find_model(tmp_path, "step12")


def test_shards_and_types(tmp_path: Path) -> None:
    run = trained("diloco", 4)
    base = checkpoint(run, tmp_path)
    code, said = export(base, "--out", tmp_path, "--max-shard-size", 1e-6 * 0.2, "--dtype", "bf16")
    assert code == 2, said  # below the least size
    code, said = export(base, "--out", tmp_path, "--max-shard-size", 1e-6, "--dtype", "bf16")
    assert code == 0, said
    code, said = export(base, "--out", tmp_path / "fp32")
    whole = load_file(tmp_path / "fp32" / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == whole.keys()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, whole[name].bfloat16())


def test_files_of_a_limited_size(tmp_path: Path) -> None:
    model = find_model(checkpoint(trained("diloco", 4), tmp_path), None)
    extra = {"steps": torch.tensor([3]), "layers.0.bias": torch.zeros(1)}
    files = write_safetensors(model, extra, tmp_path / "out", torch.float32, 300, print)
    assert files[0].name == "model-00001-of-00004.safetensors"
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == 168 * 4 + 8
    assert set(index["weight_map"].values()) == {f.name for f in files[:-1]}
    found: dict[str, torch.Tensor] = {}
    for file in files[:-1]:
        found.update(load_file(file))
    assert found.keys() == index["weight_map"].keys()
    assert found["steps"].tolist() == [3]
    assert found["layers.0.bias"].shape == (6,)


def test_the_anchor_stands_in_for_a_mean_of_clusters_that_are_elsewhere(tmp_path: Path) -> None:
    run = trained("streaming_diloco", 6)
    base = checkpoint(run, tmp_path)
    (base / "cluster_0").rename(tmp_path / "elsewhere")
    code, said = export(base, "--out", tmp_path)
    assert code == 0 and "this is the anchor, which they share" in said
    found = load_file(tmp_path / "model.safetensors")
    for loop in run.loops:
        for fragment, anchor in zip(loop.adapter.fragments, loop.state.anchor, strict=True):
            for slot in fragment.layout:
                part = anchor[slot.offset : slot.offset + slot.numel]
                assert torch.equal(found[slot.name].flatten(), part)


def test_errors(tmp_path: Path) -> None:
    base = checkpoint(trained("dreamddp", 4), tmp_path)
    (tmp_path / "empty").mkdir()
    cases = [
        ((tmp_path / "empty", "--out", tmp_path), "holds no cluster_<m>"),
        ((tmp_path / "absent", "--out", tmp_path), "no run directory at"),
        ((base, "--out", tmp_path, "--tag", "b"), "no complete checkpoint 'b'"),
        ((base, "--out", tmp_path, "--format", "onnx"), "must be one of safetensors, universal"),
        ((base, "--out", tmp_path, "--dtype", "int8"), "must be one of fp32, bf16, fp16"),
        ((base, "--out", tmp_path, "--format", "universal"), "has no *_optim_states.pt"),
    ]
    for arguments, message in cases:
        code, said = export(*arguments)
        assert code == 2 and message in said, said
    (base / "cluster_1").rename(tmp_path / "elsewhere")
    code, said = export(base, "--out", tmp_path)
    assert code == 2 and "copy the directories of all clusters there" in said
