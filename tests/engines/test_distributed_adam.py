"""apex's DistributedFusedAdam in several ranks of two clusters: masters in shards of buckets.

With its double, and with the class itself where `--apex PATH` gives a tree, both on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from dsx.engines.distributed_adam import lay_out
from tests.distributed import run_distributed
from tests.engines import fused
from tests.engines.fused_distributed import DistributedFusedAdam, of_tree
from tests.tiny import TinyNet

RANKS, STOP, LAST = 2, 6, 12
SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "bucket_cap_mb": 1e-4}  # 64 elements
STREAM: dict[str, Any] = {
    "preset": "streaming_diloco",
    "schedule": {"interval": 4},
    "fragments": {"num_fragments": 2},
    "delay": {"steps": 2, "alpha": 0.3},
}
DILOCO: dict[str, Any] = {
    "preset": "diloco", "schedule": {"interval": 4}, "outer_optimizer": {"lr": 0.7},
}  # fmt: skip
ALONE: dict[str, Any] = {  # without an anchor, beside which masters would be rounded
    "preset": "local_sgd", "schedule": {"interval": 4}, "fragments": {},
    "delay": {"type": "average"}, "outer_optimizer": {"type": "none"},
}  # fmt: skip
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=["double", "apex"])
def tree(request: pytest.FixtureRequest) -> str | None:
    """The tree that the class is of; None for the double."""
    given = request.config.getoption("--apex")
    if request.param == "apex" and given is None:
        pytest.skip("no tree of apex: give one with --apex PATH")
    return given if request.param == "apex" else None


def ranks(function: Callable[..., Any], num_ranks: int, tree: str | None, *args: Any) -> list[Any]:
    engine = "megatron" if tree else "deepspeed"  # with CUDA on the CPU
    return run_distributed(function, num_ranks, tree, *args, timeout_seconds=200, engine=engine)


def config_of(method: dict[str, Any], num_clusters: int) -> dict[str, Any]:
    clusters = {"num_clusters": num_clusters, "deadline_seconds": 60}
    return {"dsx": {**method, "clusters": clusters}}


def kind_of(tree: str | None) -> Any:
    if tree is None:
        return DistributedFusedAdam
    from dsx.bench.megatron_on_cpu import install

    install()
    return of_tree(Path(tree))


def make(tree: str | None, net: nn.Module, **settings: Any) -> Any:
    """Return the optimizer; gradients are summed, as gloo has no mean."""
    settings = {**SETTINGS, "average_grad_sync": False, **settings}
    return kind_of(tree)(net.parameters(), **settings)


def loss_of(model: nn.Module, cluster: int, rank: int, step: int) -> Tensor:
    kind = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1000 * cluster + 100 * rank + step)
    x = torch.randn(4, 6, generator=generator)
    return (model(x.to(kind)).float() - x.roll(1, dims=1)).square().mean() / RANKS


def take_step(net: nn.Module, optimizer: Any, cluster: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(net, cluster, dist.get_rank() % RANKS, step).backward()
    optimizer.step()


def kept(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights, and masters and moments as the optimizer itself puts them together. Collective."""
    state = optimizer.state_dict()["state"]
    found = {f"weight {n}": p.detach().float().clone() for n, p in net.named_parameters()}
    for index, _ in enumerate(net.parameters()):
        found |= {f"{name} {index}": value.clone() for name, value in state[index].items()}
    return {name: value.numpy() for name, value in found.items()}


def settings_of(dtype: str) -> dict[str, Any]:
    return {} if dtype == "fp32" else {"param_sync_dtype": torch.bfloat16}


def train(tree: str | None, dtype: str) -> dict[str, Any]:
    """Two clusters of DiLoCo."""
    world = dsx.init_distributed(config_of(DILOCO, 2))
    torch.manual_seed(world.cluster_id)
    net = TinyNet().to(TYPES[dtype])
    optimizer = make(tree, net, **settings_of(dtype))
    handle = dsx.attach(net, optimizer, config=config_of(DILOCO, 2))
    start = kept(net, optimizer)
    for step in range(1, LAST + 1):
        take_step(net, optimizer, world.cluster_id, step)
    end = kept(net, optimizer)
    with handle.averaged():
        averaged = kept(net, optimizer)
    fragments = handle.loop.adapter.fragments
    held = {slot.name: slot.numel for fragment in fragments for slot in fragment.layout}
    handle.close()
    return {"start": start, "end": end, "averaged": averaged, "held": held}


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.ci), "bf16"])
def test_the_outer_step_is_that_of_the_shards(tree: str | None, dtype: str) -> None:
    """Two clusters of two ranks, against plain loops with the mean by hand."""
    found = ranks(train, 2 * RANKS, tree, dtype)
    expected = reference(TYPES[dtype], found[0]["start"])
    for rank in found:
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(rank["end"][name]), value, rtol=0, atol=2e-6)
        for name, value in rank["averaged"].items():  # right behind an outer step
            assert (value == rank["end"][name]).all() or not name.startswith(("weight", "param"))
    for cluster in (found[:RANKS], found[RANKS:]):
        own = [rank["held"] for rank in cluster]
        assert any(".bucket_" in name for name in own[0])  # cut by the end of one
        assert sum(sum(held.values()) for held in own) == sum(
            p.numel() for p in TinyNet().parameters()
        )
    assert [rank["held"] for rank in found[:RANKS]] == [rank["held"] for rank in found[RANKS:]]


def reference(dtype: torch.dtype, start: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and masters of two clusters behind an outer step."""
    models = [TinyNet().to(dtype) for _ in range(2)]
    anchor = [torch.tensor(start[f"param {i}"]) for i, _ in enumerate(models[0].parameters())]
    momentum = [torch.zeros_like(a) for a in anchor]
    own = [[a.clone() for a in anchor] for _ in range(2)]
    moments = [[{n: torch.zeros_like(a) for n in fused.MOMENTS} for a in anchor] for _ in range(2)]
    group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for step in range(1, LAST + 1):
        for cluster, model in enumerate(models):
            put(model, own[cluster])
            gradients = [torch.zeros_like(a) for a in anchor]
            for rank in range(RANKS):
                model.zero_grad()
                loss_of(model, cluster, rank, step).backward()
                for total, p in zip(gradients, model.parameters(), strict=True):
                    total += p.grad.float()
            for value, gradient, state in zip(
                own[cluster], gradients, moments[cluster], strict=True
            ):
                fused.adamw(value, gradient, state, {**group, "step": step})
        if step % 4 == 0:
            for i, (a, b) in enumerate(zip(*own, strict=True)):
                gradient = ((anchor[i] - a) + (anchor[i] - b)) / 2
                momentum[i] = 0.9 * momentum[i] + gradient
                anchor[i] = anchor[i] - 0.7 * (gradient + 0.9 * momentum[i])
                own[0][i], own[1][i] = anchor[i].clone(), anchor[i].clone()
    names = [name for name, _ in models[0].named_parameters()]
    weights = {f"weight {n}": a.to(dtype).float() for n, a in zip(names, anchor, strict=True)}
    return weights | {f"param {i}": a for i, a in enumerate(anchor)}


def put(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)


def resume(tree: str | None, dtype: str, base: str) -> tuple[Any, Any, int]:
    """Return what a run comes to, and what one does from a checkpoint of its midst."""
    world = dsx.init_distributed(config_of(STREAM, 2))
    directory = Path(base) / f"cluster_{world.cluster_id}"
    net = TinyNet().to(TYPES[dtype])
    optimizer = make(tree, net, **settings_of(dtype))
    handle = dsx.attach(net, optimizer, config=config_of(STREAM, 2))
    for step in range(1, LAST + 1):
        take_step(net, optimizer, world.cluster_id, step)
        if step == STOP:
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            handle.save(directory)
            in_flight = len(handle.loop.in_flight)
    whole = kept(net, optimizer)
    handle.close()

    torch.manual_seed(7)
    net = TinyNet().to(TYPES[dtype])
    optimizer = make(tree, net, **settings_of(dtype))
    handle = dsx.attach(net, optimizer, config=config_of(STREAM, 2))
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load(directory)
    for step in range(STOP + 1, LAST + 1):
        take_step(net, optimizer, world.cluster_id, step)
    part = kept(net, optimizer)
    handle.close()
    return whole, part, in_flight


@pytest.mark.ci
@pytest.mark.parametrize("dtype", TYPES)
def test_a_resumed_run_is_the_same_to_the_bit(tree: str | None, dtype: str, tmp_path: Path) -> None:
    for whole, part, in_flight in ranks(resume, 2 * RANKS, tree, dtype, str(tmp_path)):
        assert whole.keys() == part.keys() and in_flight
        assert all((part[name] == value).all() for name, value in whole.items())


def alone(tree: str | None) -> list[tuple[Any, Any]]:
    """One cluster, of one group and of two that hold the same: without dsx, and with it."""
    dsx.init_distributed(config_of(ALONE, 1))
    size = dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    crossed = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
    rank = dist.get_rank()
    groups = {
        "distributed_process_group": pairs[rank // 2],
        "redundant_process_group": crossed[rank % 2],
    }
    found: list[tuple[Any, Any]] = []
    for dtype in TYPES:
        for its in ({}, groups):
            both: list[Any] = []
            for is_attached in (False, True):
                torch.manual_seed(3)
                net = TinyNet().to(TYPES[dtype])
                optimizer = make(tree, net, **settings_of(dtype), **its)
                lay_out(optimizer)  # by which ranks' gradients are added in one order or another
                handle = (
                    dsx.attach(net, optimizer, config=config_of(ALONE, 1)) if is_attached else None
                )
                for step in range(1, LAST + 1):
                    take_step(net, optimizer, 0, step)
                both.append(kept(net, optimizer))
                if handle is not None:
                    assert handle.totals.syncs == 3
                    handle.close()
            found.append((both[0], both[1]))
    return found


@pytest.mark.ci
def test_one_cluster_is_the_plain_optimizer(tree: str | None) -> None:
    """To the bit, with shards on all ranks and with shards that two ranks hold alike."""
    for of_rank in ranks(alone, 4, tree):
        assert len(of_rank) == 4
        for plain, ours in of_rank:
            assert plain.keys() == ours.keys()
            assert all((ours[name] == value).all() for name, value in plain.items())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "types": (
        {"dtype": torch.float16, "param_sync_dtype": torch.float16},
        "dsx does not serve dtype=torch.float16 of apex's DistributedFusedAdam: its masters have",
    ),
    "remainders": (
        {"store_params": False, "store_param_remainders": True, "param_sync_dtype": torch.bfloat16},
        "dsx does not serve store_param_remainders=True of apex's DistributedFusedAdam: leave it",
    ),
    "copies": ({"store_params": False}, "dsx does not serve store_params=False of apex's"),
    "overlapped": ({"overlap_param_sync": True}, "dsx does not serve overlap_param_sync=True of"),
}


def refusals(tree: str | None) -> dict[str, str]:
    dsx.init_distributed(config_of(ALONE, 1))

    def said(model: nn.Module, optimizers: Any, **method: Any) -> str:
        try:
            dsx.attach(model, optimizers, config=config_of({**ALONE, **method}, 1)).close()
        except ValueError as error:
            return str(error)
        return "served"

    found: dict[str, str] = {}
    for name, (settings, _) in REFUSED.items():
        net = TinyNet()
        found[name] = said(net, make(tree, net, **settings))
    net = TinyNet()
    found["DDP"] = said(nn.parallel.DistributedDataParallel(net), make(tree, net))
    net = TinyNet()
    handle = dsx.attach(net, make(tree, net), config=config_of(ALONE, 1))
    try:
        dsx.TorchCheckpoints(handle)
    except ValueError as error:
        found["checkpoints"] = str(error)
    handle.close()
    net = TinyNet()
    layers = list(net.parameters())
    rest = torch.optim.AdamW(layers[1:])
    found["beside"] = said(net, [kind_of(tree)(layers[:1]), rest])
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    net = TinyNet()
    found["few"] = said(net, make(tree, net, process_group=own[dist.get_rank()]))
    return found


@pytest.mark.ci
def test_what_is_not_served_is_refused_by_name(tree: str | None) -> None:
    for found in ranks(refusals, 2, tree):
        for name, (_, told) in REFUSED.items():
            assert found[name].startswith(told), found[name]
        assert found["DDP"].startswith("apex's DistributedFusedAdam reduces gradients itself")
        assert found["beside"].startswith("apex's DistributedFusedAdam beside AdamW, which keeps")
        assert found["checkpoints"].startswith("TorchCheckpoints does not save apex's Distributed")
        assert found["few"].startswith("the model is spread over 1 of this cluster's 2 ranks")
