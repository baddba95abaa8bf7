"""What TorchCheckpoints does not serve is refused before anything is written, or changed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsx
from tests.distributed import run_distributed
from tests.engines.torch_ranks import config_of

SIZE = 8


class Rows(torch.optim.Optimizer):
    """SGD that keeps a tensor of this rank's rows from its `since`-th step on, and counts steps."""

    def __init__(self, parameters: Any, since: int) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.since = since

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            kept = self.state[p]
            kept["step"] = kept.get("step", torch.zeros(1)) + 1
            if kept["step"] >= self.since:
                kept["momentum"] = p.grad.to_local().clone()
            p.add_(p.grad, alpha=-0.1)


def rows(since: int) -> Any:
    def make_rows(model: Any) -> Any:
        return Rows(model.parameters(), since)

    return make_rows


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters())


def adamw_of_each(model: Any) -> Any:
    return torch.optim.AdamW([{"params": [p]} for p in model.parameters()])


def adamw_of_reversed(model: Any) -> Any:
    return torch.optim.AdamW(list(model.parameters())[::-1])


def make(optimizer: Any) -> tuple[Any, Any, Any, dsx.TorchCheckpoints]:
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = optimizer(model)
    handle = dsx.attach(model, optimizers, config=config_of("diloco"))
    return model, optimizers, handle, dsx.TorchCheckpoints(handle)


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, SIZE)).square().mean().backward()
    optimizer.step()


def said(work: Any) -> str:
    with pytest.raises(ValueError) as refused:
        work()
    return str(refused.value)


def work(base: str) -> dict[str, Any]:
    dsx.init_distributed(config_of("diloco"))
    found: dict[str, Any] = {}
    model, optimizer, handle, checkpoints = make(rows(1))
    found["first step"] = said(lambda: train(model, optimizer))
    handle.close()
    model, optimizer, handle, checkpoints = make(rows(3))
    train(model, optimizer)
    assert checkpoints.save(f"{base}/rows")
    train(model, optimizer)
    train(model, optimizer)
    found["save"] = said(lambda: checkpoints.save(f"{base}/rows"))
    train(model, optimizer)
    handle.close()  # the first one is written beside training
    dist.barrier()
    found["left"] = sorted(p.name for p in Path(base, "rows").glob("cluster_*/*"))
    model, optimizer, handle, checkpoints = make(adamw)
    train(model, optimizer)
    assert checkpoints.save(f"{base}/one")
    handle.close()
    for name, group in {"number": adamw_of_each, "order": adamw_of_reversed}.items():
        model, optimizer, handle, checkpoints = make(group)
        before = [p.full_tensor().clone() for p in model.parameters()]
        found[name] = said(partial(checkpoints.load, f"{base}/one"))
        after = [p.full_tensor() for p in model.parameters()]
        found[f"{name} kept"] = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        handle.close()
    return found


@pytest.mark.ci
def test_what_is_not_served_is_refused_first(tmp_path: Path) -> None:
    for found in run_distributed(work, 2, str(tmp_path), timeout_seconds=150):
        rows = "Rows keeps momentum of 0.weight as a plain Tensor of (8, 8), which may be another"
        assert found["first step"].startswith(rows)
        assert found["save"].startswith(f"nothing is saved: {rows}")
        assert set(found["left"]) == {"step1"}
        assert "holds 1 parameter group(s), and this run's optimizers 4" in found["number"]
        assert "the same parameters in another order" in found["order"]
        assert found["number kept"] and found["order kept"]
