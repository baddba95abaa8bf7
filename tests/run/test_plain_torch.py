"""`python -m dsx.run` over a loop in plain PyTorch, beside DiLoCo in plain torch."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsx.config.files import ConfigError
from dsx.run.end import finish_before_destroy
from dsx.run.plain_torch import _PlainLoop, without_containers
from dsx.run.process_group import keep_world, require_own_world
from dsx.run.session import RouteNotTaken
from tests.distributed import free_port
from tests.run.launching import run
from tests.run.train_with_torch import BATCH, LR, SAMPLES, Samples, make_model

SCRIPT = Path(__file__).with_name("train_with_torch.py")
INTERVAL = 4
FLAGS = ["--dsx-preset", "diloco", "--dsx-num-clusters", 2, "--dsx-schedule-interval", INTERVAL]


def launch(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 4]
    command = [*torchrun, "--master-port", free_port(), "-m", "dsx.run", *FLAGS, SCRIPT]
    return run(([*command, "--out", tmp_path, *arguments], {}), at=tmp_path)[0]


def diloco(orders: list[list[list[int]]]) -> list[torch.Tensor]:
    """Train clusters of several ranks on what each has read; return the last round's anchor."""
    data = Samples()
    models = [make_model() for _ in orders]
    inner = [torch.optim.Adam(model.parameters(), lr=LR) for model in models]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    momentum = [torch.zeros_like(p) for p in anchor]
    for step in range(1, len(orders[0][0]) // BATCH + 1):
        for model, optimizer, ranks in zip(models, inner, orders, strict=True):
            numbers = [n for order in ranks for n in order[(step - 1) * BATCH : step * BATCH]]
            x, y = (torch.stack([data[n][i] for n in numbers]) for i in (1, 2))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if step % INTERVAL == 0:
            for number, value in enumerate(anchor):
                local = [list(model.parameters())[number].detach() for model in models]
                mean = sum(value - one for one in local) / len(models)
                momentum[number] = 0.9 * momentum[number] + mean
                value -= 0.7 * (mean + 0.9 * momentum[number])
                for one in local:
                    one.copy_(value)
    return anchor


@pytest.mark.ci
@pytest.mark.parametrize("engine", ["ddp", "fully_shard"])
def test_a_loop_with_several_ranks_is_diloco(tmp_path: Path, engine: str) -> None:
    status, output = launch(tmp_path, "--engine", engine)
    assert status == 0, output
    read = [json.loads((tmp_path / f"read_{rank}.json").read_text()) for rank in range(4)]
    assert sorted(n for rank in read for n in rank) == list(range(SAMPLES))
    expected = diloco([read[:2], read[2:]])
    for launched in range(4):
        weights = torch.load(tmp_path / f"weights_{launched}.pt")
        for ours, whole in zip(weights, expected, strict=True):
            part = whole if engine == "ddp" else whole.chunk(2)[launched % 2]
            torch.testing.assert_close(ours, part, rtol=1e-5, atol=1e-6)


@pytest.mark.ci
def test_a_second_model_is_refused_by_its_first_step(tmp_path: Path) -> None:
    status, output = launch(tmp_path, "--engine", "ddp", "--second-model")
    assert status != 0
    assert "the script trains a second model, with SGD.step(), and only the first" in output


def test_the_world_of_a_cluster_is_kept_wherever_a_script_imports_it_from() -> None:
    done: list[str] = []
    own = SimpleNamespace(
        init_process_group=lambda backend=None, timeout=None: done.append("init"),
        destroy_process_group=lambda group: done.append("destroy"),
    )
    distributed: Any = SimpleNamespace(
        **vars(own),
        distributed_c10d=own,
        is_initialized=lambda: True,
        group=SimpleNamespace(WORLD=1),
    )
    session: Any = SimpleNamespace(finish=lambda: done.append("finish"), has_met_script=True)
    keep_world(session, distributed)
    finish_before_destroy(session, distributed)
    for place in (distributed, own):
        place.init_process_group()
        place.destroy_process_group()
    assert done == ["init", "finish", "destroy"] * 2


class Container(torch.optim.Optimizer):
    """Steps others, as torchtitan's does."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for p in o.param_groups[0]["params"]], {})


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_part_of_the_model_that_is_called_first_is_refused_by_name(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = SimpleNamespace(has_engine=False)
    loop, model = _PlainLoop(session), make_model()
    monkeypatch.setattr("dsx.run.plain_torch.current_world", lambda: object())
    made = optimizer(model.parameters(), lr=0.1)
    loop.made.append(weakref.ref(made))
    said = f"trains with {optimizer.__name__}, and the first .* Linear, lacks 2 of the parameters"
    with pytest.raises(RouteNotTaken, match=said):
        loop.before_forward(model[0], ())


def test_a_container_of_optimizers_is_not_attached() -> None:
    model = make_model()
    of_layers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model[i].parameters()) for i in (0, 2)
    ]
    assert without_containers([Container(of_layers), *of_layers]) == of_layers
    assert without_containers(of_layers) == of_layers


def test_what_steps_beside_the_attached_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = SimpleNamespace(has_engine=False)
    loop = _PlainLoop(session)
    loop.watch = SimpleNamespace(remove=lambda: None)
    monkeypatch.setattr("dsx.run.plain_torch.current_world", lambda: object())
    monkeypatch.setattr(loop, "_attach", lambda module, optimizers: None)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        loop.made.append(weakref.ref(made))
        return made

    model, second = make_model(), make_model()
    first = sgd(model)
    loop.before_forward(model, ())
    for known in (first, Container([first]), Container([Container([first])])):
        loop._before_step(known, (), {})
    new, other = sgd(model), sgd(second)
    around = Container([other])
    loop.made.append(weakref.ref(around))
    for one in (new, Container([new])):
        with pytest.raises(RouteNotTaken, match="with a second optimizer of the attached model"):
            loop._before_step(one, (), {})
    for one in (around, other):
        with pytest.raises(RouteNotTaken, match="trains a second model, with"):
            loop._before_step(one, (), {})


@pytest.mark.parametrize("given", [{"world_size": 4}, {"rank": 3}, {"world_size": 2, "rank": 3}])
def test_a_world_that_is_not_the_clusters_is_refused(given: dict[str, Any]) -> None:
    world: Any = SimpleNamespace(world_size=2, rank=1)
    require_own_world({"world_size": 2, "rank": 1}, world)
    require_own_world({"backend": "nccl"}, world)
    with pytest.raises(ConfigError, match="a script's world is that of its cluster"):
        require_own_world(given, world)
