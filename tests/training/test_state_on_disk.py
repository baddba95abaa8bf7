"""A run whose outer state is on disk: the bits of one in memory, also over a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from tests.distributed import run_distributed
from tests.outer.test_mapped import is_in
from tests.tiny import TinyNet, batch


def train(folder: Path, device: str, resume: bool, last: int) -> dict[str, Any]:
    """Train to a step, from the checkpoint in `folder` if that is asked for; save there."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    block: dict[str, Any] = {
        "preset": "dilocox", "clusters": {"num_clusters": 2, "deadline_seconds": 60},
        "schedule": {"interval": 3}, "control": {"type": "fixed"},
        "compression": {"type": "quantized", "error_feedback": "fp32", "kernels": "eager"},
        "state": {"device": device} | ({"dir": str(disk)} if device == "disk" else {}),
    }  # fmt: skip
    config = {"dsx": block}
    world = dsx.init_distributed(config)
    model = TinyNet(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)
    saved = folder / f"{world.cluster_id}"
    if resume:
        handle.load(saved / "outer")
        parts = torch.load(saved / "inner.pt")
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
    for step in range(handle.step + 1, last + 1):
        optimizer.zero_grad()
        model(*batch(world.cluster_id, step)).backward()
        optimizer.step()
    state = handle.loop.state
    tensors = [t for f in range(len(state.channels)) for t in state.named_state(f).values()]
    told = [is_in(disk, tensor) for tensor in tensors if tensor.numel() > 8]
    if not resume:
        handle.save(saved / "outer")
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(parts, saved / "inner.pt")
    found = {name: value.clone().numpy() for name, value in model.state_dict().items()}
    assert not [*disk.iterdir()]
    handle.close()
    return {"weights": found, "are_on_disk": {*told}}


@pytest.mark.ci
def test_state_on_disk_is_that_in_memory_also_over_a_checkpoint(tmp_path: Path) -> None:
    ends: dict[str, Any] = {}
    for first, then in (("host", "host"), ("disk", "host"), ("host", "disk")):
        folder = tmp_path / f"{first} {then}"
        folder.mkdir()
        begun = run_distributed(train, 2, folder, first, False, 8)
        ended = run_distributed(train, 2, folder, then, True, 14)
        for device, ranks in ((first, begun), (then, ended)):
            assert all(rank["are_on_disk"] == {device == "disk"} for rank in ranks)
        ends[f"{first} {then}"] = [rank["weights"] for rank in ended]
    for others in ends.values():
        for rank, expected in zip(others, ends["host host"], strict=True):
            assert all((rank[name] == value).all() for name, value in expected.items())


def test_a_disk_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    told = run_distributed(refused, 2, str(tmp_path / "nowhere"))
    assert all("nowhere' is no folder on this host: make it on every host" in text for text in told)


def refused(folder: str) -> str:
    block = {
        "preset": "diloco", "clusters": {"num_clusters": 2, "deadline_seconds": 60},
        "state": {"device": "disk", "dir": folder},
    }  # fmt: skip
    dsx.init_distributed({"dsx": block})
    model = TinyNet(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match=r"state\.dir") as caught:
        dsx.attach(model, optimizer, config={"dsx": block})
    return str(caught.value)
