"""Weights of 16 bits whose masters the optimizer keeps, as apex's and Transformer Engine's do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from dsx.engines.torch import TorchAdapter
from dsx.method.fragments import WholeModel
from tests.distributed import run_distributed
from tests.engines import fused
from tests.simulated import Simulated
from tests.tiny import CASES, TinyNet, mean_loss

Make = Callable[[nn.Module], torch.optim.Optimizer]


def of_engine(model: nn.Module) -> torch.optim.Optimizer:
    return fused.EngineFusedAdam(model.parameters(), lr=0.01, weight_decay=0.1, master_weights=True)


def of_apex(model: nn.Module) -> torch.optim.Optimizer:
    fields = {"capturable": True, "master_weights": True}
    return fused.ApexFusedAdam(model.parameters(), lr=0.01, weight_decay=0.1, **fields)


KINDS: dict[str, tuple[Make, torch.dtype]] = {
    "engine, bf16": (of_engine, torch.bfloat16),
    "engine, fp16": (of_engine, torch.float16),
    "apex, fp16": (of_apex, torch.float16),
}


def masters(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The masters where their packages keep them."""
    if hasattr(optimizer, "param_groups_master"):
        found = [p for g in optimizer.param_groups_master for p in g["params"]]
    else:
        found = [optimizer.state[p]["master_param"] for p in model.parameters()]
    return [p.detach().clone() for p in found]


def loss_of(model: nn.Module, cluster: int, step: int) -> Tensor:
    kind = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(100 * cluster + step)
    x = torch.randn(4, 6, generator=generator)
    return (model(x.to(kind)).float() - x.roll(1, dims=1)).square().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_the_outer_step_is_that_of_the_masters(kind: str) -> None:
    """Two clusters of DiLoCo, against plain loops and the mean by hand, to the bit."""
    make, dtype = KINDS[kind]
    start = TinyNet().to(dtype)
    method = dsx.preset("diloco", 2, schedule={"interval": 4}, outer_optimizer={"lr": 0.7})
    run = Simulated(start, make, method, 2)

    models = [copy.deepcopy(start) for _ in range(2)]
    optimizers: list[Any] = [make(model) for model in models]
    anchor = [p.detach().float() for p in start.parameters()]
    momentum = [torch.zeros_like(a) for a in anchor]
    for step in range(1, 13):
        run.train_step(loss_of)
        for cluster, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, cluster, step).backward()
            optimizer.step()
        if step % 4 == 0:
            own = [masters(m, o) for m, o in zip(models, optimizers, strict=True)]
            for i, (a, b) in enumerate(zip(*own, strict=True)):
                gradient = ((anchor[i] - a) + (anchor[i] - b)) / 2
                momentum[i] = 0.9 * momentum[i] + gradient
                anchor[i] = anchor[i] - 0.7 * (gradient + 0.9 * momentum[i])
            for model, optimizer in zip(models, optimizers, strict=True):
                put(model, optimizer, anchor)
    for model, optimizer, plain, its in zip(
        run.models, run.optimizers, models, optimizers, strict=True
    ):
        for ours, theirs in zip(masters(model, optimizer), masters(plain, its), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        for p, master in zip(model.parameters(), masters(model, optimizer), strict=True):
            assert p.dtype == dtype and torch.equal(p, master.to(dtype))


def put(model: nn.Module, optimizer: Any, values: list[Tensor]) -> None:
    with torch.no_grad():
        for index, (p, value) in enumerate(zip(model.parameters(), values, strict=True)):
            if hasattr(optimizer, "param_groups_master"):
                optimizer.param_groups_master[0]["params"][index].copy_(value)
            else:
                optimizer.state[p]["master_param"].copy_(value)
            p.copy_(value)


@pytest.mark.parametrize("kind", KINDS)
def test_one_cluster_without_outer_steps_is_the_plain_optimizer(kind: str) -> None:
    make, dtype = KINDS[kind]
    start = TinyNet().to(dtype)
    method = dsx.preset("local_sgd", 1, schedule={"interval": 4})
    run, plain = Simulated(start, make, method, 1), copy.deepcopy(start)
    optimizer: Any = make(plain)
    for step in range(1, 10):
        run.train_step(loss_of)
        optimizer.zero_grad()
        loss_of(plain, 0, step).backward()
        optimizer.step()
    own = masters(run.models[0], run.optimizers[0])
    assert all(map(torch.equal, own, masters(plain, optimizer)))
    assert all(map(torch.equal, run.models[0].parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", ["engine, bf16", "apex, fp16"])
def test_weights_without_their_masters_are_told(kind: str) -> None:
    """After a load: Transformer Engine's come with the state, apex's with none."""
    make, dtype = KINDS[kind]
    model = TinyNet().to(dtype)
    optimizer = make(model)
    adapter = TorchAdapter(model, optimizer, WholeModel(), 1)
    values = torch.empty(adapter.fragments[0].numel)
    adapter.read(0, values)
    for _ in range(2):
        loss_of(model, 0, 1).backward()
        optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    adapter.read(0, values)

    other = TinyNet().to(dtype)
    with torch.no_grad():
        other.load_state_dict({n: torch.zeros_like(v) for n, v in saved[0].items()})
    its = make(other)
    its_adapter = TorchAdapter(other, its, WholeModel(), 1)
    its_adapter.read(0, torch.empty_like(values))
    other.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    found = torch.empty_like(values)
    if kind.startswith("engine"):
        its_adapter.read(0, found)
        assert torch.equal(found, values)
    else:
        with pytest.raises(ValueError, match=r"parameter .* \(float16\) is not what .* rounds to"):
            its_adapter.read(0, found)
    adapter.detach(), its_adapter.detach()


def train_copies(kind: str) -> list[tuple[list[Any], list[Any]]]:
    """Two ranks a cluster under DDP: before a boundary and behind it, weights and masters."""
    make, dtype = KINDS[kind]
    schedule = {"schedule": {"interval": 4}, "outer_optimizer": {"type": "sgd", "lr": 1.0}}
    config = {"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}, **schedule}}
    dsx.init_distributed(config)
    net = TinyNet().to(dtype)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = make(model)
    handle = dsx.attach(model, optimizer, config=config)
    found: list[tuple[list[Any], list[Any]]] = []
    for step in range(1, 9):
        optimizer.zero_grad()
        loss_of(model, 2 * handle.cluster_id + dist.get_rank(), step).backward()
        optimizer.step()
        if step in (7, 8):
            weights = [p.detach().float().numpy() for p in net.parameters()]
            found.append((weights, [m.numpy() for m in masters(net, optimizer)]))
    handle.finish()
    handle.close()
    return found


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["engine, bf16", "apex, fp16"])
def test_ranks_of_a_cluster_write_their_parts_of_the_masters_and_all_make_weights(
    kind: str,
) -> None:
    ranks = run_distributed(train_copies, 4, kind)
    for moment, is_equal in enumerate((False, True)):
        (first, one), (second, two), (_, other), _ = [rank[moment] for rank in ranks]
        dtype = KINDS[kind][1]
        for a, b, m, n, o in zip(first, second, one, two, other, strict=True):
            assert (a == b).all() and (m == n).all()
            assert torch.equal(torch.from_numpy(a), torch.from_numpy(m).to(dtype).float())
            assert (m == o).all() == is_equal


def of(kind: Any, **fields: Any) -> Make:
    return lambda model: kind(model.parameters(), **fields)


REFUSED: dict[str, tuple[Make, torch.dtype, str]] = {
    "apex, distributed": (
        of(fused.ApexDistributedFusedLAMB),
        torch.float32,
        "apex's DistributedFusedLAMB parts",
    ),
    "apex in bf16": (of_apex, torch.bfloat16, "is bfloat16, which this FusedAdam steps without"),
    "apex in fp32": (of_apex, torch.float32, "keeps a second copy of it: leave master_weights out"),
    "engine in fp32": (of_engine, torch.float32, "keeps a second copy of it"),
    "no masters": (of(fused.EngineFusedAdam), torch.bfloat16, "the outer step needs fp32 masters"),
    "masters in fp16": (
        of(fused.EngineFusedAdam, master_weights=True, master_weight_dtype=torch.float16),
        torch.bfloat16,
        r"FusedAdam\(master_weight_dtype\) keeps masters that are not fp32",
    ),
    "remainders": (
        of(fused.EngineFusedAdam, master_weights=True, store_param_remainders=True),
        torch.bfloat16,
        r"FusedAdam\(store_param_remainders=True\) keeps masters that are not fp32",
    ),
    "lamb": (
        of(fused.ApexMixedPrecisionLamb, reduced_precision_dtype=torch.bfloat16),
        torch.float32,
        r"FusedMixedPrecisionLamb\(reduced_precision_dtype=\.\.\.\) steps copies of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_fp32_masters_is_refused_by_name(name: str) -> None:
    make, dtype, said = REFUSED[name]
    model = TinyNet().to(dtype)
    with pytest.raises(ValueError, match=said):
        TorchAdapter(model, make(model), WholeModel(), 1)


def test_parameters_in_codes_are_refused_though_they_say_that_they_are_fp32() -> None:
    model = nn.Linear(3, 3)
    codes = model.weight.detach().as_subclass(fused.QuantizedTensor)
    model.weight = nn.Parameter(codes)
    assert model.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="weight is a QuantizedTensor of Transformer Engine"):
        TorchAdapter(model, torch.optim.SGD(model.parameters(), lr=0.1), WholeModel(), 1)


def test_a_group_that_counts_its_steps_is_not_stepped_layer_by_layer() -> None:
    method = CASES["dreamddp"].method()
    after = dsx.preset("dreamddp", 2, **{
        **CASES["dreamddp"].overrides,
        "schedule": {**CASES["dreamddp"].overrides["schedule"], "when": "after"},
    })  # fmt: skip
    make = of(fused.EngineFusedAdam, lr=0.01)
    Simulated(TinyNet(), make, method, 2).train_step(mean_loss)
    with pytest.raises(ValueError, match="FusedAdam of .* would count each as a step of all"):
        Simulated(TinyNet(), make, after, 2)
