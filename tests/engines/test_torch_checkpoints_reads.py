"""Plain PyTorch on other ranks than it was saved by: no rank reads much more than its share."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsx
from dsx.engines.distributed_files import load, read_metadata
from dsx.engines.distributed_state import place_for
from tests.distributed import run_distributed
from tests.engines.torch_ranks import CLUSTERS, config_of

ROWS, WIDTH = 1200, 500


def build(seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, ROWS, bias=False), nn.Linear(ROWS, WIDTH, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def bytes_read() -> int:
    """What this process has read of files until now."""
    return int(Path("/proc/self/io").read_text().split()[1])


def whole(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    found = {n: p.detach().full_tensor().numpy() for n, p in model.named_parameters()}
    for number, kept in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{n}": v.full_tensor().numpy() for n, v in kept.items() if n != "step"}
        found[f"{number}.step"] = kept["step"].numpy()
    return found


def work(base: str, saves: bool) -> dict[str, Any]:
    world = dsx.init_distributed(config_of("diloco"))
    model, optimizer = build(world.cluster_id if saves else 9)
    handle = dsx.attach(model, optimizer, config=config_of("diloco"))
    checkpoints = dsx.TorchCheckpoints(handle)
    if saves:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        assert checkpoints.save(base, "a")
        found = whole(model, optimizer)
        handle.close()
        return {"whole": found}
    path = Path(base) / f"cluster_{world.cluster_id}" / "a" / "torch"
    place = place_for(model, read_metadata(path))
    before = bytes_read()
    load(place, path, checkpoints._tools()[0])
    read = bytes_read() - before
    share = 3 * sum(p.to_local().nbytes for p in model.parameters())
    checkpoints.load(base)
    found = whole(model, optimizer)
    handle.close()
    return {"whole": found, "read": read, "share": share}


@pytest.mark.ci
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_rank_reads_its_share(before: int, after: int, tmp_path: Path) -> None:
    saved = run_distributed(work, before * CLUSTERS, str(tmp_path), True, timeout_seconds=200)
    loaded = run_distributed(work, after * CLUSTERS, str(tmp_path), False, timeout_seconds=200)
    for rank, result in enumerate(loaded):
        expected = saved[rank // after * before]["whole"]
        assert expected.keys() == result["whole"].keys()
        assert all((expected[n] == w).all() for n, w in result["whole"].items())
        assert result["share"] * 0.9 < result["read"] <= result["share"] * 1.1, result["read"]


class Trap:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("sprung"),)


def test_no_other_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="which is nothing of a checkpoint's: it would run code"):
        read_metadata(tmp_path)
    assert not Path("sprung").exists()
