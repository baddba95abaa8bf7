"""Plain PyTorch: several optimizers, what nobody trains, models that differ, ranks, handles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import dsx
from dsx.engines.settings import settings_of_modules
from dsx.engines.torch import TorchAdapter, as_list, require_unattached
from dsx.method.fragments import WholeModel
from tests.distributed import run_distributed
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, CASES, LINK, TinyNet, batch, mean_loss

NUM_STEPS = 13


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices, and the rest."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def one(model: nn.Module) -> Optimizer:
    matrices, rest = split(model)
    return AdamW([{"params": matrices, "lr": 0.01}, {"params": rest, "lr": 0.03}])


def two(model: nn.Module) -> list[Optimizer]:
    matrices, rest = split(model)
    return [AdamW(matrices, lr=0.01), AdamW(rest, lr=0.03)]


@pytest.mark.parametrize("name", ["slowmo", "streaming_diloco", "dreamddp", "dreamddp, after"])
def test_two_optimizers_train_like_one_of_two_groups(name: str) -> None:
    """Bit for bit; in "after", each takes its share of a layer inside the backward."""
    method = ALL_CASES[name].method()
    if name == "slowmo":
        method = dsx.preset("slowmo", 2, schedule={"interval": 4}, outer_optimizer={
            "scale_by_lr": True, "lr": 0.9, "momentum": 0.5,
        })  # fmt: skip
    first, second = (Simulated(TinyNet(), make, method, 2) for make in (one, two))
    for _ in range(NUM_STEPS):
        assert first.train_step(mean_loss) == second.train_step(mean_loss)
    for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def simulate(models: list[nn.Module], make: Any = one, name: str = "diloco") -> Any:
    method = CASES[name].method(len(models))
    return dsx.SimulatedClusters(models, [make(model) for model in models], method)


def test_a_parameter_in_no_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no optimizer holds parameter layers.0.bias and 3 more"):
        simulate([TinyNet(), TinyNet()], lambda m: SGD(split(m)[0], 0.1))
    with pytest.raises(ValueError, match=r"layers.1.weight is held by two .*AdamW and SGD"):
        simulate([TinyNet()], lambda m: [AdamW(m.parameters()), SGD([m.layers[1].weight], 0.1)])
    with pytest.raises(ValueError, match=r"holds 9 parameters, 8 of them in the model"):
        other = nn.Parameter(torch.zeros(2))
        simulate([TinyNet()], lambda m: [SGD(m.parameters(), 0.1), SGD([other], 0.1)])


def test_a_tied_weight_and_a_frozen_one_need_no_second_optimizer() -> None:
    models = [TinyNet(), TinyNet()]
    for model in models:
        model.layers[3].weight = model.layers[0].weight
        model.layers[2].bias.requires_grad_(False)
    trained = [[p for p in m.parameters() if p.requires_grad] for m in models]
    clusters = dsx.SimulatedClusters(
        models, [SGD(params, 0.1) for params in trained], CASES["diloco"].method()
    )
    names = [slot.name for slot in clusters.loops[0].adapter.fragments[0].layout]
    assert sorted(names) == sorted(
        n for n, _ in TinyNet().named_parameters() if n not in ("layers.3.weight", "layers.2.bias")
    )


def test_a_parameter_that_is_unfrozen_outside_of_the_optimizer_is_refused_by_name() -> None:
    """At the first boundary, though the optimizer has been given it, too."""
    models = [TinyNet(), TinyNet()]
    for model in models:
        model.layers[1].weight.requires_grad_(False)
    clusters = simulate(models, lambda m: SGD([p for p in m.parameters() if p.requires_grad], 0.1))
    clusters.train_step(mean_loss)
    for model, optimizer in zip(models, clusters.optimizers, strict=True):
        model.layers[1].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [model.layers[1].weight]})
    with pytest.raises(RuntimeError, match=r"parameter layers.1.weight was frozen and in no opt"):
        clusters.train_step(mean_loss)


class Named(nn.Module):
    """Parameters by name, in this order."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value, requires_grad=value.dtype == torch.float32))


SQUARE, FLAT, HALF = torch.ones(2, 2), torch.ones(4, 1), torch.ones(2, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"b": SQUARE, "a": SQUARE}, r"parameters\[0\].name: cluster 0 has a, cluster 1 has b"),
        ({"a": SQUARE, "c": SQUARE}, r"parameters\[1\].name: cluster 0 has b, cluster 1 has c"),
        ({"a": SQUARE}, r"the length of parameters: cluster 0 has 2, cluster 1 has 1"),
        ({"a": SQUARE, "b": FLAT}, r"parameters\[1\].shape\[0\]: cluster 0 has 2, cluster 1 has 4"),
        ({"a": SQUARE, "b": HALF}, r"dtype: cluster 0 has float32, cluster 1 has bfloat16"),
    ],
)
def test_models_that_differ_are_refused_with_the_first_difference(
    other: dict[str, torch.Tensor], said: str
) -> None:
    models: list[nn.Module] = [Named(a=SQUARE, b=SQUARE), Named(**other)]
    with pytest.raises(ValueError, match=f"the models differ at .*{said}"):
        simulate(models, lambda m: SGD([p for p in m.parameters() if p.requires_grad], 0.1))


def test_a_parameter_of_two_clusters_is_refused() -> None:
    models = [TinyNet(), TinyNet()]
    models[1].layers[0].weight = models[0].layers[0].weight
    with pytest.raises(ValueError, match="two clusters share one model object, or a parameter"):
        simulate(models)


def test_models_of_which_other_parameters_are_trained_are_refused() -> None:
    models = [TinyNet(), TinyNet()]
    models[1].layers[0].weight.requires_grad_(False)
    said = r"trained\[0\].slots\[0\].name: cluster 0 has layers.0.weight, cluster 1 has layers.0.b"
    with pytest.raises(ValueError, match=said):
        simulate(models, lambda m: SGD([p for p in m.parameters() if p.requires_grad], 0.1))


class Wrapped:
    """An optimizer that is none of torch's."""


class OfTypeAlone(Optimizer):
    """One by its type alone, as a wrapper may be."""

    def __init__(self) -> None:
        pass


def test_what_is_no_torch_optimizer_is_refused_by_its_type() -> None:
    model = TinyNet()
    for given in (Wrapped(), [SGD(model.parameters(), 0.1), Wrapped()], OfTypeAlone()):
        said = r"(Wrapped|OfTypeAlone) has not the step hooks of a torch.optim.Optimizer"
        with pytest.raises(TypeError, match=said):
            as_list(given)  # pyright: ignore[reportArgumentType]


def counted(model: nn.Module) -> tuple[TorchAdapter, list[Optimizer], list[bool]]:
    """Return an adapter of two optimizers, and whether each step so far was skipped."""
    optimizers, passed = two(model), list[bool]()
    adapter = TorchAdapter(model, optimizers, WholeModel())
    adapter.on_inner_step(lambda is_skipped: passed.append(is_skipped))
    return adapter, optimizers, passed


def test_an_inner_step_is_over_when_each_optimizer_has_stepped() -> None:
    adapter, (first, second), passed = counted(TinyNet())
    for optimizer in (first, second, second, first):  # the order may change
        optimizer.step()
    assert len(passed) == 2
    second.step()
    adapter.end_inner_step()  # a GradScaler has skipped the first: Handle.skip_inner_step
    for optimizer in (first, second):
        optimizer.step()
    assert passed == [False] * 3
    first.found_inf, second.found_inf = torch.ones(1), torch.zeros(1)  # as a GradScaler tells
    for was_skipped in (False, True):
        for optimizer in (first, second):
            optimizer.step()
        assert passed[-1] == was_skipped  # only where none has stepped
        second.found_inf = torch.ones(1)
    first.step()
    with pytest.raises(RuntimeError, match=r"optimizer 0 \(AdamW\) has stepped twice and opt.* 1"):
        first.step()


def test_a_model_is_attached_once_until_it_is_let_go() -> None:
    model = TinyNet()
    adapter, optimizers, passed = counted(model)
    with pytest.raises(ValueError, match=r"layers.0.weight has a dsx handle already: .*close\(\)"):
        require_unattached(nn.Sequential(model).parameters())
    require_unattached(copy.deepcopy(model).parameters())
    adapter.detach()
    require_unattached(model.parameters())
    for optimizer in optimizers:
        optimizer.step()
    assert not passed


def config(name: str, **overrides: Any) -> dict[str, Any]:
    clusters = {"num_clusters": 2, "deadline_seconds": 30}
    return {"dsx": {"preset": name, "clusters": clusters, "schedule": {"interval": 4}, **overrides}}


def message_of(*args: Any, **kwargs: Any) -> str:
    try:
        dsx.attach(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "attached"


def train_two_ranks() -> dict[str, Any]:
    """Two ranks of two clusters: refusals, then a training under DDP, then another handle."""
    world = dsx.init_distributed(config("diloco"))
    bare = TinyNet(world.cluster_id)
    said = {"bare": message_of(bare, two(bare), config=config("diloco"))}
    model = nn.parallel.DistributedDataParallel(bare)
    after = config("dreamddp", schedule={"when": "after"})
    said["layerwise"] = message_of(model, two(model), config=after)
    more = nn.ModuleList([model, nn.Linear(2, 2)])
    said["outside"] = message_of(more, two(more), config=config("diloco"))
    alone = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    apart = nn.parallel.DistributedDataParallel(TinyNet(0), process_group=alone)
    said["apart"] = message_of(apart, two(apart), config=config("diloco"))
    optimizers = two(model)
    handle = dsx.attach(model, optimizers, config=config("diloco"))
    said["twice"] = message_of(model, two(model), config=config("diloco"))
    compiled: Any = torch.compile(model, backend="eager")  # a handle is there, but ranks are alike
    said["compiled"] = message_of(compiled, two(model), config=config("diloco"))
    said["wrapper"] = settings_of_modules(model.named_modules()).keys() & {""}
    for step in range(1, NUM_STEPS + 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(*batch(world.cluster_id, step, world.rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
    with handle.averaged():
        with pytest.raises(RuntimeError, match=r"finish\(\) inside averaged\(\)"):
            handle.finish()
        with pytest.raises(RuntimeError, match=r"an inner step inside averaged\(\)"):
            handle.skip_inner_step()
    handle.finish()
    trained = {n: p.detach().clone().numpy() for n, p in bare.named_parameters()}
    handle.close()
    timed = config("cocodc", schedule={"interval": 6, "gamma": 0.7, **LINK})
    second = dsx.attach(model, optimizers, config=timed)
    for optimizer in optimizers:
        optimizer.step()
    said["again"] = f"{handle.step}, {second.step}"
    second.close()
    second.close()  # as an outer `finally` does: nothing is left to let go of
    return {"said": said, "trained": trained}


def test_ranks_of_a_cluster_train_one_model_or_are_refused() -> None:
    results = run_distributed(train_two_ranks, 4, timeout_seconds=120)
    run = Simulated(TinyNet(), two, dsx.preset("diloco", 2, schedule={"interval": 4}), 2)
    for _ in range(NUM_STEPS):
        run.train_step(lambda model, m, step: mean_loss(model, m, step, 2))
    run.finish()
    for rank, result in enumerate(results):
        said = result["said"]
        assert said["bare"].startswith("this cluster has 2 ranks, each of which would train a Tiny")
        assert "has not averaged its gradients yet" in said["layerwise"]
        assert said["outside"].startswith("parameter 1.weight is trained outside of Distributed")
        assert said["apart"].startswith("the model is spread over 1 of this cluster's 2 ranks")
        assert "has a dsx handle already" in said["twice"]
        assert "has a dsx handle already" in said["compiled"]
        assert not said["wrapper"]  # whose devices are a host's own
        assert said["again"] == f"{NUM_STEPS}, 1"
        for name, value in run.parameters()[rank // 2].items():
            trained = torch.from_numpy(result["trained"][name])
            torch.testing.assert_close(trained, value, rtol=0, atol=2e-6)
            other = torch.from_numpy(results[rank // 2 * 2]["trained"][name])
            assert torch.equal(trained, other)
