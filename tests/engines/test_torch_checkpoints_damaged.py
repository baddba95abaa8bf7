"""Plain PyTorch's files with a flipped bit: an earlier tag is loaded, or the one named refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.checkpoint.checksums import checksum, find_damage
from dsx.checkpoint.remote import Remote
from tests.distributed import run_distributed
from tests.engines.torch_ranks import config_of
from tests.installed import needs

SIZE = 64


def make(seed: int, **checkpoints: Any) -> tuple[Any, Any, Any, dsx.TorchCheckpoints]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = config_of("diloco")
    config["dsx"] |= {"checkpoints": checkpoints}
    handle = dsx.attach(model, optimizer, config=config)
    return model, optimizer, handle, dsx.TorchCheckpoints(handle)


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 16
    path.write_bytes(content)


def told_of(work: Any) -> str:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - which one it is is asked
        return f"{type(error).__name__}: {error}"
    return ""


def save_and_damage(base: str) -> dict[str, Any]:
    world = dsx.init_distributed(config_of("diloco"))
    near = Path(base) / "near"
    model, optimizer, handle, checkpoints = make(
        world.cluster_id, beside_training=True, remote=f"file://{base}/far"
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, SIZE)).square().mean().backward()
        optimizer.step()
        assert checkpoints.save(near)
    checkpoints.close()
    handle.close()
    tag = near / f"cluster_{world.cluster_id}" / "step2"
    found: dict[str, Any] = {"whole": find_damage(tag), "wrong": {}, "loaded": {}}
    manifest = json.loads((tag / "dsx.json").read_text())
    found["files"] = sorted(p.name for p in (tag / "torch").iterdir())
    found["noted"] = {n: d for n, d in manifest["checksums"].items() if n.startswith("torch/")}
    found["true"] = {n: checksum(tag / n) for n in found["noted"]}
    found["sizes"] = set(found["noted"]) <= set(manifest["sizes"])
    model, optimizer, handle, checkpoints = make(9)
    for name in ("__0_0.distcp", ".metadata"):
        path = near / "cluster_1" / "step2" / "torch" / name
        handle.gather("before")
        middle = path.stat().st_size // 3  # far from the last of a file's many archives
        if world.cluster_id == 1:
            flip(path, middle)
        handle.gather("flipped")
        found["wrong"][name] = told_of(lambda: checkpoints.load(near, "step2"))
        found["loaded"][name] = str(checkpoints.load(near))
        handle.gather("loaded")
        if world.cluster_id == 1:
            flip(path, middle)
    found["again"] = str(checkpoints.load(near))
    handle.close()
    return found


@pytest.mark.ci
@needs("fsspec")
def test_a_flipped_bit_is_found_and_an_earlier_tag_taken(tmp_path: Path) -> None:
    results = run_distributed(save_and_damage, 2, str(tmp_path), timeout_seconds=120)
    for result in results:
        assert result["whole"] is None and result["sizes"]
        assert result["files"] == [".metadata", "__0_0.distcp"]
        assert result["noted"] == result["true"] and len(result["noted"]) == 2
        for name, wrong in result["wrong"].items():
            path = tmp_path / "near" / "cluster_1" / "step2" / "torch" / name
            assert wrong.startswith(f"ValueError: cluster 1: {path} has changed since it was saved")
            assert result["loaded"][name].endswith("/step1")
        assert result["again"].endswith("/step2")
    held = json.loads(Remote(f"file://{tmp_path}/far", "here").manifest(1, "step2"))
    assert held["checksums"].items() >= results[1]["noted"].items()
