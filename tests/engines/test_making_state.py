"""Steps of torch's own, of an optimizer that has kept nothing yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dsx.engines import making_state
from dsx.engines.torch import TorchAdapter
from dsx.method.fragments import WholeModel


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    making_state._makes_state.cache_clear()
    yield
    making_state._makes_state.cache_clear()


def attached() -> tuple[torch.nn.Linear, torch.optim.AdamW, list[bool]]:
    model, steps = torch.nn.Linear(2, 2), list[bool]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    TorchAdapter(model, optimizer, WholeModel()).on_inner_step(steps.append)
    return model, optimizer, steps


def test_they_are_no_inner_steps_and_those_of_training_are() -> None:
    model, optimizer, steps = attached()
    weight = model.weight.detach().clone()
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state and not steps and model.weight.equal(weight)
    for count in range(1, 4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert len(steps) == count
        get_optimizer_state_dict(model, optimizer)


def test_a_torch_that_takes_them_by_another_name_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, optimizer, steps = attached()
    monkeypatch.delattr(state_dict, "_init_optim_state")
    for _ in range(2):
        optimizer.step()
    assert len(steps) == 2
    assert [r.message[:13] for r in caplog.records] == ["this torch ha"]
